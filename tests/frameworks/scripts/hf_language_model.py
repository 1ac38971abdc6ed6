"""A causal language model by transformers.Trainer: sequences of different lengths, accumulated gradients, bfloat16,
gradient checkpointing, and a run that goes on from its newest snapshot. `hf_language_model.py OUTPUT_DIR`."""

import os
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.nn.utils import parameters_to_vector
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint


class Counting(Dataset):
    """Sequences that count up, of 4 to 16 words."""

    def __init__(self, samples, seed):
        generator = torch.Generator().manual_seed(seed)
        self.lengths = torch.randint(4, 17, (samples,), generator=generator)
        self.starts = torch.randint(0, 80, (samples,), generator=generator)

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        return {"words": (self.starts[index] + torch.arange(int(self.lengths[index]))) % 97 + 1}


def padded(samples):
    length = max(len(sample["words"]) for sample in samples)
    words = torch.zeros(len(samples), length, dtype=torch.long)
    for row, sample in zip(words, samples, strict=True):
        row[: len(sample["words"])] = sample["words"]
    return {"input_ids": words, "attention_mask": (words > 0).long(), "labels": words.masked_fill(words == 0, -100)}


class Nap(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        time.sleep(pace())


class Distance:
    """How far the weights have gone."""

    def __init__(self, model):
        self.last = parameters_to_vector(model.parameters()).detach().clone()
        self.gone, self.steps = torch.zeros_like(self.last), 0

    def update(self, model):
        now = parameters_to_vector(model.parameters()).detach().clone()
        self.gone += (now - self.last).abs()
        self.last, self.steps = now, self.steps + 1


class Averages(TrainerCallback):
    """Writes what it keeps beside the model: an average of the weights, and a vector as long as all weights."""

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        self.distance = Distance(model)

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.average.update_parameters(model)
        self.distance.update(model)

    def on_train_end(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            where = Path(args.output_dir, "averages")
            where.mkdir(exist_ok=True)
            tensors = {name: value.clone() for name, value in self.average.named_parameters()}
            steps = torch.tensor([self.average.n_averaged, self.distance.steps])
            save_file({**tensors, "gone": self.distance.gone, "steps": steps}, where / "model.safetensors")


def pace():
    """Seconds that a step takes at least, which a test sets while the job runs."""
    file = Path(os.environ.get("LIVE_GATES", "")) / "pace"
    return float(file.read_text()) if file.is_file() else 0.0


set_seed(2)
dropout = float(os.environ.get("DROPOUT", "0.1"))
model = GPT2LMHeadModel(
    GPT2Config(
        vocab_size=100,
        n_positions=32,
        n_embd=32,
        n_layer=2,
        n_head=2,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=0,
        eos_token_id=0,
    )
)
arguments = TrainingArguments(
    output_dir=sys.argv[1],
    per_device_train_batch_size=2,
    per_device_eval_batch_size=4,
    gradient_accumulation_steps=2,
    max_steps=int(os.environ.get("STEPS", "40")),
    learning_rate=1e-3,
    lr_scheduler_type="cosine",
    warmup_steps=5,
    logging_steps=int(os.environ.get("LOG_EVERY", "4")),
    eval_on_start=True,
    eval_strategy="steps",
    eval_steps=10,
    save_steps=10,
    save_total_limit=2,
    bf16=os.environ.get("BF16", "1") == "1",
    gradient_checkpointing=True,
    include_num_input_tokens_seen="non_padding",
    remove_unused_columns=False,
    report_to=os.environ.get("REPORT_TO", "none").split(","),
    use_cpu=True,
    seed=2,
)
trainer = Trainer(
    model=model,
    args=arguments,
    train_dataset=Counting(190, 0),
    eval_dataset=Counting(int(os.environ.get("EVALUATED", "40")), 1),
    data_collator=padded,
    callbacks=[Nap(), Averages()],
)
found = os.path.isdir(sys.argv[1]) and get_last_checkpoint(sys.argv[1])
trainer.train(resume_from_checkpoint=found or None)
trainer.save_state()
