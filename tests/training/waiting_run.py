"""A training run whose forward pass waits for the device, so that it cannot be captured."""

import sys

from torch import Tensor

from longctx import cli
from longctx.training.module import TrainingModule

whole = TrainingModule.training_step


def waiting(*arguments: object) -> Tensor:
    loss = whole(*arguments)  # type: ignore[arg-type]
    loss.item()
    return loss


if __name__ == "__main__":
    TrainingModule.training_step = waiting  # type: ignore[assignment, method-assign]
    sys.exit(cli.main(["train", *sys.argv[1:]]))
