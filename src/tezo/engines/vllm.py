"""vLLM: prompts under LoRA adapters, several in one batch, in this process or on a server that the user has started.

A text is a prompt. Log-probabilities of its own next tokens come with the prompt; those of other tokens at a place are
asked for by a prompt that ends there. A change of the weights is a LoRA adapter in PEFT's format with a name that was
never used before: what vLLM has cached of prompts under an earlier adapter is of no other change.
"""

import contextlib
import os
import shutil
import socket
import tempfile
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad

from tezo.engines.client import FOLDER
from tezo.engines.prompts import Answer, Prompt, prompts_of, told_of
from tezo.forward.engine import Asked, Change, Continuing, Engine, Told
from tezo.models.in_file import load_folder
from tezo.models.kinds import ModelConfig
from tezo.models.loading import LoadedModel, dtype_name
from tezo.models.lora import ALLOWED_RANKS, Adapter, next_allowed, save_adapter
from tezo.system.errors import RequestError

AT_ONCE = 8
"""Changes that are computed side by side; vLLM puts as many of them into a batch as its max_loras allows."""
OWN = f"tezo-{socket.gethostname()}-"
"""What names of adapters of this machine begin with, before the number of the process."""
MOST_DIGITS = 10
"""Digits of the largest number of a process."""


def is_left(name: str) -> bool:
    """Returns whether an adapter or its folder is of a process of this machine that is gone."""
    process = name.removeprefix(OWN).partition("-")[0]
    is_number = process.isascii() and process.isdigit() and len(process) <= MOST_DIGITS
    return name.startswith(OWN) and is_number and not Path(f"/proc/{process}").exists()


class Vllm(Engine):
    """A model of vLLM.

    Args:
        model: its modules, for the names of layers.
    """

    at_once = AT_ONCE

    def __init__(self, model: Any) -> None:
        self._model = model
        shared = os.environ.get(FOLDER) or ("/dev/shm" if Path("/dev/shm").is_dir() else tempfile.gettempdir())
        self._shared = Path(shared)
        for left in self._shared.glob(f"{OWN}*"):  # by a process that was killed
            if is_left(left.name):
                shutil.rmtree(left, ignore_errors=True)

    def changes(self, module: str) -> bool:
        return self._model.get_submodule(module) is not self._model.get_output_embeddings()

    def log_probs(self, changes: Sequence[Change], asked: Asked) -> list[Told]:
        prompts = prompts_of(asked)
        if any(prompt.wanted for prompt in prompts) and asked.likely > 1:
            raise RequestError(f"{self.name} tells the likeliest tokens at places with one right token alone.")
        with contextlib.ExitStack() as files:
            folders = [files.enter_context(self._folder(change)) for change in changes]
            return [told_of(asked, prompts, answers) for answers in self._answers(prompts, folders, asked.likely)]

    def generate(
        self, changes: Sequence[Change], prompts: Sequence[Sequence[int]], wanted: Continuing
    ) -> list[list[list[int]]]:
        with contextlib.ExitStack() as files:
            return self._continued(prompts, [files.enter_context(self._folder(change)) for change in changes], wanted)

    @abstractmethod
    def _continued(
        self, prompts: Sequence[Sequence[int]], folders: Sequence[Path], wanted: Continuing
    ) -> list[list[list[int]]]:
        """Returns the continuations under the adapter in each folder."""

    def _no_change(self, rank: int = 1) -> Change:
        return self._one_layer(rank, 0.0)

    def _one_layer(self, rank: int, size: float) -> Change:
        """Returns a change of one layer by `size` times outputs of about 1."""
        name, layer = next(
            (name, module)
            for name, module in self._model.named_modules()
            if isinstance(module, nn.Linear) and self.changes(name)
        )
        draw = torch.Generator().manual_seed(0)
        a_RI, b_OR = (
            torch.randn(shape, generator=draw) for shape in ((rank, layer.in_features), (layer.out_features, rank))
        )
        return {name: (a_RI / layer.in_features**0.5, size * b_OR)}

    @abstractmethod
    def _answers(self, prompts: Sequence[Prompt], folders: Sequence[Path], likely: int) -> list[list[Answer]]:
        """Returns the answers to all prompts under the adapter in each folder."""

    @contextmanager
    def _folder(self, change: Change) -> Iterator[Path]:
        """Yields a folder with a change as an adapter, which is removed at the end."""
        with tempfile.TemporaryDirectory(prefix=f"{OWN}{os.getpid()}-", dir=self._shared) as name:
            Path(name).chmod(0o755)  # a server may be of another user
            # vLLM 0.32 computes prompts without an adapter under those of others in the batch
            save_adapter(uniform(change or self._no_change()), Path(name), model=self._model, base="")
            yield Path(name)


def uniform(change: Change) -> Adapter:
    """Returns a change as an adapter of one rank."""
    rank = max(a_RI.shape[0] for a_RI, _ in change.values())
    pairs = {}
    for name, (a_RI, b_OR) in change.items():
        more = rank - a_RI.shape[0]
        pairs[name] = pad(a_RI, (0, 0, 0, more)), pad(b_OR, (0, more)).contiguous()
    return Adapter(rank, pairs)


def load_vllm(config: ModelConfig) -> LoadedModel:
    """Loads a model into vLLM in this process.

    Raises:
        RequestError: vLLM is missing, or cannot run the model.
    """
    loaded, source = load_folder(config.name, config.dtype)
    dtype = dtype_name(loaded.model.config.dtype)
    return replace(loaded, engine=InProcess(source, loaded.model), dtype=dtype)


class InProcess(Vllm):
    """vLLM in this process, started for the largest rank of a change, which its memory and time depend on.

    It is started again where a larger one comes.

    Args:
        source: folder of the model.
        model: its modules.
    """

    name = "vllm"

    def __init__(self, source: str, model: Any) -> None:
        super().__init__(model)
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        try:
            import vllm  # noqa: F401
        except ImportError as error:
            raise RequestError(
                f"model.engine is vllm, which is not installed here ({error}); install it, or give the address of a "
                "server: --engine http://HOST:8000."
            ) from None
        self._source, self._rank, self._number = source, 0, 0
        self._llm: Any = None

    def reserve(self, rank: int) -> None:
        if rank <= self._rank:
            return
        if rank > ALLOWED_RANKS[-1]:
            raise RequestError(
                f"model.engine is vllm, whose adapters have rank {ALLOWED_RANKS[-1]} at most, and this one has {rank}; "
                "lower method.rank or method.frozen_rank."
            )
        from vllm import LLM

        self._end()
        last = sorted({name.rpartition(".")[2] for name, module in self._model.named_modules()
                       if isinstance(module, nn.Linear) and self.changes(name)})  # fmt: skip
        self._rank = next_allowed(rank)
        self._llm = LLM(
            model=self._source,
            # vLLM's own choice for float32 is half of it
            dtype=str(self._model.config.dtype or "auto").removeprefix("torch."),
            enable_lora=True,
            max_loras=AT_ONCE,
            max_lora_rank=self._rank,
            lora_target_modules=last,  # the head's LoRA breaks log-probabilities of prompts
            enforce_eager=True,
            disable_log_stats=True,
        )

    def _end(self) -> None:
        if self._llm is None:
            return
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        core, self._llm = self._llm.llm_engine.engine_core, None
        core.shutdown()
        cleanup_dist_env_and_memory()

    def _answers(self, prompts: Sequence[Prompt], folders: Sequence[Path], likely: int) -> list[list[Answer]]:
        from vllm import SamplingParams, TokensPrompt

        options = [
            SamplingParams(
                max_tokens=1,
                temperature=0.0,
                detokenize=False,
                logprob_token_ids=list(prompt.wanted) or None,
                prompt_logprobs=None if prompt.wanted else likely,
            )
            for prompt in prompts
        ]
        adapters = self._adapters(folders)
        texts = [TokensPrompt(prompt_token_ids=list(prompt.tokens)) for prompt in prompts] * len(folders)
        under = [adapter for adapter in adapters for _ in prompts]
        outputs = self._llm.generate(texts, options * len(folders), lora_request=under, use_tqdm=False)
        every = zip(list(prompts) * len(folders), outputs, strict=True)
        found = [self._answer(prompt, output) for prompt, output in every]
        for adapter in adapters:
            self._llm.llm_engine.remove_lora(adapter.lora_int_id)
        return [found[start : start + len(prompts)] for start in range(0, len(found), len(prompts))]

    def _continued(
        self, prompts: Sequence[Sequence[int]], folders: Sequence[Path], wanted: Continuing
    ) -> list[list[list[int]]]:
        from vllm import SamplingParams, TokensPrompt

        more: dict[str, Any] = {"stop": ["\n"]} if wanted.one_line else {}
        more |= {"max_tokens": wanted.most, "temperature": wanted.temperature, "stop_token_ids": list(wanted.ends)}
        seeds: Sequence[int | None] = wanted.seeds or [None] * len(prompts)
        options = [SamplingParams(seed=seed, **more) for seed in seeds]
        adapters = self._adapters(folders)
        texts = [TokensPrompt(prompt_token_ids=list(prompt)) for prompt in prompts] * len(folders)
        under = [adapter for adapter in adapters for _ in prompts]
        outputs = self._llm.generate(texts, options * len(folders), lora_request=under, use_tqdm=False)
        for adapter in adapters:
            self._llm.llm_engine.remove_lora(adapter.lora_int_id)
        found = [list(output.outputs[0].token_ids) for output in outputs]
        return [found[start : start + len(prompts)] for start in range(0, len(found), len(prompts))]

    @contextmanager
    def _folder(self, change: Change) -> Iterator[Path]:
        self.reserve(max((a_RI.shape[0] for a_RI, _ in change.values()), default=1))
        with super()._folder(change) as folder:
            yield folder

    def _adapters(self, folders: Sequence[Path]) -> list[Any]:
        from vllm.lora.request import LoRARequest

        adapters = []
        for folder in folders:
            self._number += 1  # a number that was used before is a cached adapter
            adapters.append(LoRARequest(f"tezo-{self._number}", self._number, str(folder)))
        return adapters

    def _answer(self, prompt: Prompt, output: Any) -> Answer:
        def table(entry: Any) -> dict[int, tuple[float, int]]:
            return {int(token): (float(own.logprob), int(own.rank)) for token, own in entry.items()}

        if prompt.wanted:
            return Answer({len(prompt.tokens): table(output.outputs[0].logprobs[0])})
        return Answer({i: table(entry) for i, entry in enumerate(output.prompt_logprobs) if entry})
