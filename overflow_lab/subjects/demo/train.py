"""Make the demo model: `OMP_NUM_THREADS=1 python -m overflow_lab.subjects.demo.train [FOLDER]`.

Tokenizer, initial weights, training, rescaling, accuracy, folder; some minutes on one CPU core. See docs/demo.md.
"""

from __future__ import annotations

import copy
import logging
import random
import sys
import time

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import GenerationConfig, PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

from overflow_lab.subjects.demo import folder
from overflow_lab.subjects.demo.rescale import INNER_EXPONENT, RESIDUAL_EXPONENT, rescale
from overflow_lab.subjects.demo.task import WORDS, sample, spell

SEED = 20
STEPS = 2600
BATCH = 128
PEAK_RATE = 3e-3
# Trained T5 have a few very large channels in the stream of their encoder. These are the ones here, and by how much.
LARGE_CHANNELS = (11, 37, 52)
LARGE_WO, LARGE_O, NORM_GAIN = 160.0, 240.0, 40.0
EMBEDDING_GAIN = 0.25  # what the sublayers add outgrows the embeddings

log = logging.getLogger("overflow_lab.demo")


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of T5's kind (unigram pieces, `▁` for a space, `</s>` at the end) for words and digits."""
    pieces = ["<pad>", "</s>", "<unk>", "▁", *(f"▁{word}" for word in WORDS), *"0123456789"]
    backend = Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces], unk_id=2))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Lowercase(), normalizers.Replace("-", " "), normalizers.Replace(",", "")]
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=512
    )


def build_model(vocabulary: int) -> T5ForConditionalGeneration:
    """Return the untrained model, with the large channels in its initial weights."""
    config = T5Config(
        vocab_size=vocabulary, d_model=64, d_kv=16, d_ff=256, num_layers=3, num_heads=4,
        dropout_rate=0.0, decoder_start_token_id=0, relative_attention_num_buckets=32,
    )  # fmt: skip
    model = T5ForConditionalGeneration(config)
    channels = list(LARGE_CHANNELS)
    blocks = model.encoder.block
    with torch.no_grad():
        model.shared.weight.mul_(EMBEDDING_GAIN)
        model.decoder.final_layer_norm.weight.div_(EMBEDDING_GAIN)
        # A positive row after a relu: large, of one sign, and nearly the same for every token.
        rows = blocks[1].layer[1].DenseReluDense.wo.weight
        rows[channels] = rows[channels].abs() * LARGE_WO
        blocks[2].layer[0].SelfAttention.o.weight[channels] *= LARGE_O
        for norm in (blocks[2].layer[0].layer_norm, blocks[2].layer[1].layer_norm, model.encoder.final_layer_norm):
            norm.weight.mul_(NORM_GAIN)  # the large channels fill the mean square: lift the others back
            norm.weight[channels] = 1.0
    return model


def encode(tokenizer: PreTrainedTokenizerFast, numbers: list[int]) -> dict[str, torch.Tensor]:
    """Return int64 `input_ids`, `attention_mask` and `labels`, each (numbers, tokens); padded labels are -100."""
    source = tokenizer([spell(number) for number in numbers], padding=True, return_tensors="pt")
    target = tokenizer([str(number) for number in numbers], padding=True, return_tensors="pt")
    labels = target["input_ids"].masked_fill(target["attention_mask"] == 0, -100)
    return {"input_ids": source["input_ids"], "attention_mask": source["attention_mask"], "labels": labels}


def train(model: T5ForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, *, steps: int) -> None:
    """Train in place with Adam, one-cycle learning rate, on fresh random numbers at every step."""
    rng = random.Random(SEED)
    optimizer = torch.optim.Adam(model.parameters(), lr=PEAK_RATE, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK_RATE, total_steps=steps, pct_start=0.1)
    start = time.monotonic()
    for step in range(1, steps + 1):
        loss = model(**encode(tokenizer, sample(rng, BATCH, held_out=False))).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 100 == 0:
            log.info("step %d of %d, loss %.5f, %.0f s", step, steps, loss.item(), time.monotonic() - start)


def accuracy(model: T5ForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, *, count: int) -> float:
    """Return the share of `count` held-out numbers that beam search (4 beams) spells exactly."""
    numbers = sample(random.Random(SEED + 1), count, held_out=True)
    right = 0
    for at in range(0, count, BATCH):
        part = numbers[at : at + BATCH]
        inputs = encode(tokenizer, part)
        inputs.pop("labels")
        tokens = model.generate(**inputs, num_beams=4, max_new_tokens=32)
        texts = tokenizer.batch_decode(tokens, skip_special_tokens=True)
        right += sum(text == str(number) for text, number in zip(texts, part, strict=True))
    return right / count


def make(target: str, *, steps: int = STEPS, measured: int = 2000) -> None:
    """Build, train for `steps`, rescale, measure on `measured` held-out numbers, and write the folder `target`."""
    torch.manual_seed(SEED)
    tokenizer = build_tokenizer()
    model = build_model(len(tokenizer))
    train(model.train(), tokenizer, steps=steps)
    model.eval()
    model.generation_config = GenerationConfig(
        pad_token_id=0, eos_token_id=1, decoder_start_token_id=0, max_new_tokens=32
    )
    rescale(model, residual=RESIDUAL_EXPONENT, inner=INNER_EXPONENT)
    for dtype in (torch.float32, torch.bfloat16):
        share = accuracy(copy.deepcopy(model).to(dtype), tokenizer, count=measured)
        log.info("exact on %d held-out numbers, %s: %.4f", measured, dtype, share)
    model.save_pretrained(target)
    build_tokenizer().save_pretrained(target)  # a fresh one: use leaves the last padding in tokenizer.json
    log.info("written to %s", target)


def main() -> None:
    """Make the folder named on the command line, or the package's own."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    make(sys.argv[1] if len(sys.argv) > 1 else str(folder()))


if __name__ == "__main__":
    main()
