"""A causal language model by accelerate, as the scripts of transformers that use no Trainer: accumulated gradients,
bfloat16, sequences of different lengths, a maximum of steps, snapshots in the middle of an epoch.
`accelerate_language_model.py OUTPUT_DIR`."""

import json
import math
import os
import sys
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, Dataset
from transformers import GPT2Config, GPT2LMHeadModel, get_scheduler

MAX_STEPS = int(os.environ.get("STEPS", "40"))


class Counting(Dataset):
    """Sequences that count up, of 4 to 16 words."""

    def __init__(self, samples, seed):
        generator = torch.Generator().manual_seed(seed)
        self.lengths = torch.randint(4, 17, (samples,), generator=generator)
        self.starts = torch.randint(0, 80, (samples,), generator=generator)

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        return (self.starts[index] + torch.arange(int(self.lengths[index]))) % 97 + 1


def padded(samples):
    length = max(map(len, samples))
    words = torch.zeros(len(samples), length, dtype=torch.long)
    for row, sample in zip(words, samples, strict=True):
        row[: len(sample)] = sample
    return {"input_ids": words, "attention_mask": (words > 0).long(), "labels": words.masked_fill(words == 0, -100)}


def pace():
    """Seconds that a step takes at least, which a test sets while the job runs."""
    file = Path(os.environ.get("LIVE_GATES", "")) / "pace"
    return float(file.read_text()) if file.is_file() else 0.0


def evaluate(accelerator, model, loader, size):
    model.eval()
    losses, words = [], 0
    for batch in loader:
        with torch.no_grad():
            outputs = model(**batch)
        losses.append(accelerator.gather_for_metrics(outputs.loss.repeat(size)))
        sequences = accelerator.pad_across_processes(batch["input_ids"], dim=1, pad_index=0)
        words += int((accelerator.gather_for_metrics(sequences) > 0).sum())
    loss = torch.mean(torch.cat(losses))
    return {"eval_loss": loss.item(), "perplexity": math.exp(loss), "words": words}


def main():
    set_seed(2)
    output = sys.argv[1]
    bf16 = os.environ.get("BF16", "1") == "1"
    trackers = os.environ["REPORT_TO"].split(",") if "REPORT_TO" in os.environ else []
    precision = "bf16" if bf16 else "no"
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=2, mixed_precision=precision, log_with=trackers, project_dir=output
    )
    if trackers:
        accelerator.init_trackers("events", {"steps": MAX_STEPS} if "mlflow" in trackers else None)
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
    processes = int(os.environ.get("LOADER_PROCESSES", "1"))
    train = DataLoader(Counting(190, 0), batch_size=2, shuffle=True, collate_fn=padded, num_workers=processes)
    evaluated = DataLoader(Counting(int(os.environ.get("EVALUATED", "41")), 1), batch_size=4, collate_fn=padded)
    decayed = [weight for name, weight in model.named_parameters() if "bias" not in name]
    rest = [weight for name, weight in model.named_parameters() if "bias" in name]
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0}], 1e-3)
    scheduler = get_scheduler("cosine", optimizer, 5 * accelerator.num_processes, MAX_STEPS * accelerator.num_processes)
    model, optimizer, train, evaluated, scheduler = accelerator.prepare(model, optimizer, train, evaluated, scheduler)
    epochs = math.ceil(MAX_STEPS / math.ceil(len(train) / accelerator.gradient_accumulation_steps))
    records = []
    completed = 0
    records.append({"step": 0, **evaluate(accelerator, model, evaluated, 4)})
    for epoch in range(epochs):
        model.train()
        for _, batch in enumerate(train):
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                completed += 1
                mean = accelerator.reduce(loss.detach(), "mean")
                accelerator.log({"loss": mean.item(), "lr": scheduler.get_last_lr()[0]}, step=completed)
                if completed % 10 == 0:
                    accelerator.save_state(os.path.join(output, f"step_{completed}"))
                time.sleep(pace())
            if completed >= MAX_STEPS:
                break
        record = {"step": completed, "epoch": epoch, "lr": scheduler.get_last_lr()}
        figures = evaluate(accelerator, model, evaluated, 4)
        accelerator.log(figures, step=completed)
        records.append({**record, **figures})
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        with open(os.path.join(output, "metrics.jsonl"), "w") as file:
            file.writelines(json.dumps(record) + "\n" for record in records[-1:])
        accelerator.unwrap_model(model).save_pretrained(os.path.join(output, "model"), safe_serialization=False)
    accelerator.end_training()


if __name__ == "__main__":
    main()
