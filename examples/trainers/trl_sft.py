"""TRL's SFTTrainer with longctx's attention: python examples/trainers/trl_sft.py MODEL TEXT"""

import sys

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM
from trl import SFTConfig, SFTTrainer

import longctx.transformers

name, text = sys.argv[1:3]
model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="longctx")
longctx.transformers.check(model)  # packed documents are each alone

arguments = SFTConfig(
    "trained",
    bf16=torch.cuda.is_available(),
    packing=True,
    max_length=128,
    max_steps=20,
    save_strategy="no",
    report_to="none",
)
documents = load_dataset("text", data_files=text, split="train")
trainer = SFTTrainer(model, arguments, train_dataset=documents)
trainer.train()
trainer.save_model()
