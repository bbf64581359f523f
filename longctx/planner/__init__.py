"""What fits a machine, and how fast it runs: predictions that need neither a GPU nor torch."""

from longctx.planner.peak_memory import Memory as Memory
from longctx.planner.plans import Plan as Plan
from longctx.planner.plans import plan as plan
from longctx.planner.step_time import Seconds as Seconds
