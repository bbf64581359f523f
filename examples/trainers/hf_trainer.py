"""transformers' Trainer with longctx's attention: python examples/trainers/hf_trainer.py MODEL TEXT

Documents are packed by the collator: position_ids restart in each.
"""

import sys

from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorWithFlattening,
    Trainer,
    TrainingArguments,
)

import longctx.transformers

name, text = sys.argv[1:3]
tokenizer = AutoTokenizer.from_pretrained(name)
model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="longctx")
longctx.transformers.check(model)  # packed documents are each alone

with open(text, encoding="utf-8") as file:
    documents = [{"input_ids": tokenizer(each)["input_ids"]} for each in file if each.strip()]
arguments = TrainingArguments(
    "trained", per_device_train_batch_size=8, max_steps=20, save_strategy="no", report_to="none"
)
trainer = Trainer(
    model, arguments, train_dataset=documents, data_collator=DataCollatorWithFlattening()
)
trainer.train()
trainer.save_model()
tokenizer.save_pretrained("trained")
