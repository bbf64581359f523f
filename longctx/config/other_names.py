"""Names of our keys and values in other projects: a key of theirs is answered with ours.

From nanoGPT, transformers, TRL, peft, axolotl, torchtitan and Lightning, on 2026-11-26. One line of
`NAMES` is a key of ours and their names of it. A name in several lines means the first key that the
command has.
"""

from __future__ import annotations

from collections.abc import Collection

NAMES = {
    # Length of the run and of its steps
    "seq_len": "block_size max_seq_length max_seq_len max_length sequence_len sequence_length "
    "context_length n_ctx cutoff_len model_max_length max_position_embeddings",
    "batch_size": "micro_batch_size per_device_train_batch_size per_device_eval_batch_size "
    "local_batch_size device_batch_size",
    "accumulate": "gradient_accumulation_steps grad_accum_steps accumulate_grad_batches "
    "global_batch_size train_batch_size",
    "max_steps": "max_iters num_iterations train_iters total_steps training_steps steps",
    "max_tokens": "num_train_epochs num_epochs max_epochs epochs",
    "max_new_tokens": "max_tokens max_length max_completion_tokens num_tokens",
    # Optimizer
    "lr": "learning_rate max_lr peak_lr",
    "lr_schedule": "lr_scheduler_type lr_scheduler scheduler lr_decay_style",
    "min_lr_ratio": "min_lr cosine_min_lr_ratio min_lr_factor min_lr_rate",
    "warmup_steps": "warmup_iters lr_warmup_steps num_warmup_steps warmup_ratio",
    "betas": "beta1 beta2 adam_beta1 adam_beta2",
    "clip": "grad_clip max_grad_norm gradient_clip_val gradient_clipping max_norm",
    "optimizer": "optim optimizer_type optimizer_name",
    # Model
    "model.layers": "n_layer n_layers num_hidden_layers num_layers depth",
    "model.heads": "n_head n_heads num_attention_heads num_heads",
    "model.kv_heads": "n_kv_head n_kv_heads num_key_value_heads num_kv_heads",
    "model.channels": "n_embd d_model hidden_size dim model_dim embed_dim",
    "model.ffn": "intermediate_size d_ff ffn_dim hidden_dim mlp_dim",
    "model.tied": "tie_word_embeddings tie_weights weight_tying",
    "model.window": "sliding_window attention_window window_size",
    "attention": "attn_implementation flash_attention use_flash_attention flash_attn",
    "rope": "rope_type yarn rope_scaling",
    "lora.rank": "lora_r lora_rank r adapter peft",
    "lora.scaling": "lora_alpha alpha",
    "lora.targets": "lora_target_modules lora_target_linear target_modules",
    "lora.base": "load_in_4bit load_in_8bit quantization bnb_4bit_quant_type",
    "lora.rslora": "use_rslora peft_use_rslora",
    "init": "base_model model_name_or_path pretrained_model_name_or_path model_name init_from",
    "objective": "rl loss_type",
    "objective.beta": "rl_beta dpo_beta",
    # Documents
    "data.path": "train_file dataset_path data_dir train_data dataset dataset_name datasets",
    "data.text_column": "dataset_text_field text_field text_key",
    "data.packing": "sample_packing",
    "data.chat": "chat_template train_on_inputs assistant_only_loss completion_only_loss",
    "data.val_fraction": "val_set_size test_size val_split",
    "data.tokenizer": "tokenizer_name tokenizer_path tokenizer_name_or_path",
    # Validation, logging, checkpoints
    "val_every": "eval_interval eval_steps eval_every val_check_interval evals_per_epoch",
    "val_rows": "eval_iters eval_batches limit_val_batches",
    "patience": "early_stopping_patience",
    "log_every": "log_interval logging_steps log_freq log_every_n_steps",
    "checkpoint_every": "save_steps save_interval save_every checkpoint_interval",
    "keep_checkpoints": "save_total_limit keep_latest_k",
    "keep_best": "load_best_model_at_end save_best",
    "runs": "out_dir output_dir default_root_dir dump_folder",
    "name": "run_name wandb_run_name wandb_name experiment_name",
    "tracker": "report_to",
    "wandb.mode": "use_wandb wandb_log enable_wandb wandb_mode",
    "wandb.project": "wandb_project",
    "wandb.entity": "wandb_entity",
    "resume": "resume_from_checkpoint auto_resume_from_checkpoints checkpoint ckpt_path",
    "checkpoint": "model model_path run init base_model model_name_or_path",
    # Machine
    "precision": "dtype bf16 fp16 torch_dtype mixed_precision",
    "memory.recompute": "gradient_checkpointing activation_checkpointing",
    "compile": "torch_compile use_compile compile_model",
    "devices": "n_gpu num_gpus nproc_per_node gpus num_processes world_size",
    "strategy": "fsdp fsdp_config deepspeed ddp data_parallel_shard_degree",
    "context": "context_parallel_size context_parallel_degree sequence_parallel_degree",
    "workers": "num_workers dataloader_num_workers dataset_num_proc",
    "seed": "random_seed data_seed",
}
# What differs in meaning
NOTES = {
    "accumulate": ", micro-batches of batch_size sequences",
    "max_tokens": ", the tokens of all epochs together; longctx data shows those of one",
    "min_lr_ratio": ", as a share of lr",
    "warmup_steps": ", a number of steps",
    "betas": ", as in betas=[0.9,0.95]",
    "lora.scaling": ", which is alpha / rank",
    "lora.rank": ", for QLoRA with lora.base=nf4",
    "lora.base": "=nf4",
    "data.path": ", with data=text or data=hub",
    "val_every": ", a number of steps",
    "checkpoint_every": ", a number of steps",
    "data.chat": "=true, by the template in the folder of init or data.tokenizer",
    "resume": ", or init to begin with its weights",
    "tracker": "=wandb, tensorboard, mlflow, trackio or none",
    "wandb.mode": "=auto, or disabled",
    "precision": "=bf16, fp32 or fp8",
    "memory.recompute": "=block, mlp or none",
}
# Names of theirs that no key or value of ours stands for alone
NOT_HERE = {
    "dropout attention_dropout lora_dropout": "models have no dropout here; leave it out",
    "use_liger_kernel": "kernels are always fused here; leave it out",
    "special_tokens eos_token pad_token": "the tokenizer's are used; leave it out",
    "push_to_hub": "runs are not uploaded; longctx export makes a folder",
    "streaming": "data=hub always streams; leave it out",
    "grpo": "there are no rewards here; objective=dpo, orpo, simpo or kto learns from answers",
}
ADVICE = {name: advice for names, advice in NOT_HERE.items() for name in names.split()}
VALUES = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "c_attn", "query_key_value"), "qkv"),
    **dict.fromkeys(("o_proj", "out_proj"), "out"),
    **dict.fromkeys(("gate_proj", "up_proj", "gate_up_proj"), "gate_up"),
    **dict.fromkeys(("flash_attention_2", "flash_attention_3"), "flash"),
    **dict.fromkeys(("gpu", "cuda:0"), "cuda"),
    **dict.fromkeys(("bfloat16", "bf16-mixed", "float16", "fp16"), "bf16"),
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "AdamW", "adam"), "adamw"),
    **{"eager": "naive", "flex_attention": "flex", "down_proj": "down", "float32": "fp32"},
    **{"tb": "tensorboard", "gpt2": "124m"},
}
OF_OTHERS = [(name, ours) for ours, names in NAMES.items() for name in names.split()]


def key_of(name: str, known: Collection[str]) -> str | None:
    """Return the key among `known` that other projects call `name`, alone or in a group of keys."""
    last = name.rpartition(".")[2]
    found = (ours for theirs, ours in OF_OTHERS if theirs in (name, last) and ours in known)
    is_key = last in known and not any(key.startswith(f"{last}.") for key in known)
    return next(found, last if is_key else None)


def answer(name: str, known: Collection[str]) -> str | None:
    """Return a line about a key of another project, None if it is not known."""
    if advice := ADVICE.get(name.rpartition(".")[2]):
        return f"{name}: {advice}"
    ours = key_of(name, known)
    return None if ours is None else f"{name}: here it is {ours}{NOTES.get(ours, '')}"
