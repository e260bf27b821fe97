"""Tiny models of real architectures with random weights, in float64 unless asked otherwise, and losses on them."""

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812
import transformers
from torch import Tensor, nn

VOCAB = 96
POSITIONS = 24


def _build(kind: str, config: transformers.PretrainedConfig, dtype: torch.dtype, seed: int) -> nn.Module:
    # sdpa: the eager attention of transformers takes its softmax in float32, whatever the model's dtype.
    config._attn_implementation = "eager" if isinstance(config, transformers.DebertaV2Config) else "sdpa"
    config._experts_implementation = "eager"
    config.use_cache = False
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = getattr(transformers, kind)(config)
        with torch.no_grad():
            for parameter in model.parameters():  # biases start at 0 and norms at 1: give them a part to play
                if parameter.ndim == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
    model = model.to(dtype).eval()
    if dtype == torch.float64:
        _keep_norms_in_float64(model)
    return model


def _keep_norms_in_float64(model: nn.Module) -> None:
    """RMS norms of transformers compute in float32; torch's own do the same in the model's dtype."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__.endswith("RMSNorm") and not isinstance(child, nn.RMSNorm):
                norm = nn.RMSNorm(child.weight.shape[0], eps=child.variance_epsilon, dtype=torch.float64)
                norm.weight = child.weight
                setattr(parent, name, norm)


def tiny_opt(
    dtype: torch.dtype = torch.float64, *, tied: bool = False, dropout: float = 0.0, seed: int = 0
) -> nn.Module:
    config = transformers.OPTConfig(
        vocab_size=VOCAB, hidden_size=16, word_embed_proj_dim=16, ffn_dim=24, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=POSITIONS, dropout=dropout, init_std=0.2,
        tie_word_embeddings=tied,
    )  # fmt: skip
    return _build("OPTForCausalLM", config, dtype, seed)


def _llama_like(kind: str, dtype: torch.dtype, tied: bool, seed: int, **more: int) -> nn.Module:
    config = getattr(transformers, kind + "Config")(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=POSITIONS, initializer_range=0.2,
        tie_word_embeddings=tied, **more,
    )  # fmt: skip
    return _build(kind + "ForCausalLM", config, dtype, seed)


def tiny_llama(dtype: torch.dtype = torch.float64, *, tied: bool = False, seed: int = 0) -> nn.Module:
    return _llama_like("Llama", dtype, tied, seed)


def tiny_qwen2(dtype: torch.dtype = torch.float64, *, tied: bool = False, seed: int = 0) -> nn.Module:
    return _llama_like("Qwen2", dtype, tied, seed)


def tiny_moe(dtype: torch.dtype = torch.float64, *, tied: bool = False, seed: int = 0) -> nn.Module:
    """Experts are 3-D parameters that no module owns as its `weight`."""
    return _llama_like(
        "Qwen3Moe", dtype, tied, seed, moe_intermediate_size=12, head_dim=8, num_experts=4, num_experts_per_tok=2
    )


def tiny_gpt2(dtype: torch.dtype = torch.float64, *, tied: bool = False, seed: int = 0) -> nn.Module:
    """Its linear layers are Conv1D, with the weight transposed."""
    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_positions=POSITIONS, n_embd=16, n_layer=2, n_head=2, n_inner=24, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, initializer_range=0.2, tie_word_embeddings=tied,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return _build("GPT2LMHeadModel", config, dtype, seed)


def tiny_falcon(dtype: torch.dtype = torch.float64, *, seed: int = 0) -> nn.Module:
    """Its linear layers are a subclass with a forward of its own."""
    config = transformers.FalconConfig(
        vocab_size=VOCAB, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, initializer_range=0.2, bias=True,
        tie_word_embeddings=False,
    )  # fmt: skip
    return _build("FalconForCausalLM", config, dtype, seed)


def _bert_like(kind: str, head: str, dtype: torch.dtype, tied: bool, seed: int) -> nn.Module:
    config = getattr(transformers, kind + "Config")(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=POSITIONS, initializer_range=0.2, tie_word_embeddings=tied,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return _build(kind + head, config, dtype, seed)


def tiny_roberta(dtype: torch.dtype = torch.float64, *, tied: bool = False, seed: int = 0) -> nn.Module:
    return _bert_like("Roberta", "ForMaskedLM", dtype, tied, seed)


def tiny_bert(dtype: torch.dtype = torch.float64, *, tied: bool = False, seed: int = 0) -> nn.Module:
    """An encoder with a pooler that its token outputs never use."""
    return _bert_like("Bert", "Model", dtype, tied, seed)


def tiny_deberta(dtype: torch.dtype = torch.float64, *, legacy: bool = False, seed: int = 0) -> nn.Module:
    """It reads its relative positions past their module, and without `legacy` its embeddings, which it also calls."""
    config = transformers.DebertaV2Config(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=POSITIONS, initializer_range=0.2, relative_attention=True, position_buckets=8,
        pos_att_type=["p2c", "c2p"], norm_rel_ebd="layer_norm", legacy=legacy, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return _build("DebertaV2ForMaskedLM", config, dtype, seed)


class Regression(nn.Module):
    """Least squares y = X W^T on fixed data: `loss()` is a convex quadratic of the weight, 0 at `target`."""

    def __init__(self, dtype: torch.dtype = torch.float64, rows: int = 3, columns: int = 4) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(3)
        self.layer = nn.Linear(columns, rows, dtype=dtype)
        with torch.no_grad():
            for parameter in self.layer.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.3)
        self.x = torch.randn(64, columns, generator=draw).to(dtype)
        self.y = (self.x.float() @ torch.randn(columns, rows, generator=draw)).to(dtype)

    def loss(self) -> Tensor:
        return (self.layer(self.x).float() - self.y.float()).square().mean()


def tokens(batch: int = 3, length: int = 10, seed: int = 1) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(4, VOCAB, (batch, length), generator=draw)


def lm_loss(model: nn.Module, ids: Tensor) -> Callable[[], Tensor]:
    """Cross-entropy of the next token, or of the token itself for a masked model, in the logits' dtype."""
    shift = 0 if isinstance(model, (transformers.RobertaForMaskedLM, transformers.DebertaV2ForMaskedLM)) else 1

    def loss() -> Tensor:
        logits = model(input_ids=ids).logits
        logits = logits[:, logits.shape[1] - ids.shape[1] :]  # an adapter may have put virtual tokens in front
        logits = logits[:, : logits.shape[1] - shift]
        logits = logits if logits.dtype == torch.float64 else logits.float()
        return F.cross_entropy(logits.flatten(0, 1), ids[:, shift:].flatten())

    return loss


def sines(a_IR: Tensor, b_IR: Tensor) -> Tensor:
    """Of the angles between two subspaces."""
    a, b = (torch.linalg.qr(x.double())[0] for x in (a_IR, b_IR))
    cosines = torch.linalg.svdvals(a.T @ b)
    return (1 - cosines.clamp_max(1).square()).sqrt()
