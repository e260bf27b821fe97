"""A small model with random weights that supports every task, for `--scale small`."""

from pathlib import Path

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from tezo.models.kinds import Kind
from tezo.tasks.catalogue import TASKS

SPECIAL = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>", "mask_token": "<mask>"}
POSITIONS = 1100


def small_model(kind: Kind, folder: Path) -> Path:
    """Writes a tiny OPT (causal) or RoBERTa (masked, encoder) with random weights and a byte tokenizer to `folder`."""
    tokenizer = _tokenizer(kind)
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"max_position_embeddings": POSITIONS, "bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if kind == "causal":
            config = transformers.OPTConfig(**sizes, ffn_dim=24, word_embed_proj_dim=16)
            model = transformers.OPTForCausalLM(config)
        else:
            roberta = transformers.RobertaForMaskedLM if kind == "masked" else transformers.RobertaModel
            model = roberta(transformers.RobertaConfig(**sizes, intermediate_size=24))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _tokenizer(kind: str) -> transformers.PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*SPECIAL.values(), *alphabet])}
    inner = Tokenizer(models.BPE(vocabulary, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.post_processor = processors.TemplateProcessing(
        single="<s> $A" if kind == "causal" else "<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, model_max_length=POSITIONS - 50, **SPECIAL)
    if kind == "masked":  # label words of masked models must be single tokens
        wordings = [task.wordings["masked"] for task in TASKS.values() if "masked" in task.wordings]
        words = dict.fromkeys(word for wording in wordings for word in wording.options)
        wrapped.add_tokens([AddedToken(word, normalized=False) for word in words])
    return wrapped
