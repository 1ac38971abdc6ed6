"""Supervised fine-tuning of LoRA adapters by trl.SFTTrainer, from a datasets.Dataset that processes fetch ahead.
`hf_sft.py OUTPUT_DIR`."""

import os
import random
import sys
import time
from pathlib import Path

from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback, set_seed
from trl import SFTConfig, SFTTrainer

WORDS = ["<pad>", "<eos>", "<unk>", *"abcdefghijklmnopqrstuvwxyz"]


class Nap(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        time.sleep(pace())


def pace():
    """Seconds that a step takes at least, which a test sets while the job runs."""
    file = Path(os.environ.get("LIVE_GATES", "")) / "pace"
    return float(file.read_text()) if file.is_file() else 0.0


def alphabet(samples, seed):
    """Pieces of the alphabet, of different lengths."""
    draw = random.Random(seed)
    starts = [draw.randrange(20) for _ in range(samples)]
    return Dataset.from_dict({"text": [" ".join(WORDS[3:][at : at + draw.randrange(3, 9)]) for at in starts]})


tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
set_seed(4)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=1,
    )
)
arguments = SFTConfig(
    output_dir=sys.argv[1],
    per_device_train_batch_size=2,
    per_device_eval_batch_size=4,
    max_steps=30,
    learning_rate=5e-3,
    logging_steps=5,
    eval_strategy="steps",
    eval_steps=10,
    save_steps=15,
    max_length=16,
    dataloader_num_workers=int(os.environ.get("LOADER_PROCESSES", "2")),
    bf16=False,
    report_to=[],
    use_cpu=True,
    seed=4,
)
trainer = SFTTrainer(
    model=model,
    args=arguments,
    train_dataset=alphabet(100, 0),
    eval_dataset=alphabet(32, 1),
    processing_class=tokenizer,
    peft_config=LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1, target_modules=["q_proj", "v_proj"]),
    callbacks=[Nap()],
)
trainer.train()
trainer.save_model()
trainer.save_state()
