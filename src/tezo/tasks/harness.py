"""Models in an engine for lm-evaluation-harness, which itself runs models of transformers."""

from collections.abc import Sequence
from typing import Any

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from tezo.forward.engine import Continuing
from tezo.models.loading import LoadedModel
from tezo.system.errors import RequestError
from tezo.tasks.examples import Example
from tezo.tasks.objectives import objective_for
from tezo.tasks.objectives.causal import CausalObjective
from tezo.tasks.objectives.objective import Encoded

MAX_NEW_TOKENS = 256
"""Longest answer where a task sets none: the harness's default."""
_EXAMPLE = Example("", "", (), None, "lm-eval")


class HarnessModel(TemplateLM):  # type: ignore[misc]  # the harness has no types
    """A causal model for the harness: its requests are scored, and continued greedily, by the model's evaluator.

    Texts are tokenized as `lm_eval.models.huggingface.HFLM` does it, so that both have the same figures.

    Args:
        loaded: the model, in an engine or in torch.
        batch_size: requests of a batch.
    """

    def __init__(self, loaded: LoadedModel, batch_size: int) -> None:
        super().__init__()
        objective = objective_for(loaded, (), loaded.max_length)
        assert isinstance(objective, CausalObjective)
        self.tokenizer = loaded.tokenizer
        self.batch_size = batch_size
        self._loaded, self._objective = loaded, objective

    @property
    def eot_token_id(self) -> int:
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        start = self.tokenizer.bos_token_id
        return self.eot_token_id if start is None else int(start)

    @property
    def tokenizer_name(self) -> str:
        return str(getattr(self.tokenizer, "name_or_path", "")).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: object) -> list[int]:
        """Returns the tokens of a text, with those that the tokenizer puts around it unless it begins with one."""
        start = self.tokenizer.decode([self.prefix_token_id])
        if add_special_tokens is None:
            add_special_tokens = not (start and string.startswith(start))
        return list(self.tokenizer(string, add_special_tokens=add_special_tokens)["input_ids"])

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Returns a conversation as text."""
        more = {} if add_generation_prompt else {"continue_final_message": True}
        return str(
            self.tokenizer.apply_chat_template(
                chat_history, tokenize=False, add_generation_prompt=add_generation_prompt, **more
            )
        )

    @torch.no_grad()
    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: object
    ) -> list[tuple[float, bool]]:
        longest, found = self._loaded.max_length, [(0.0, True)] * len(requests)
        order = sorted(range(len(requests)), key=lambda i: requests[i][1])  # options of a question side by side
        order = [i for i in order if requests[i][2]]
        for start in range(0, len(order), self.batch_size):
            part = order[start : start + self.batch_size]
            rows = []
            for _, context, continuation in (requests[i] for i in part):
                whole = tuple([*context, *continuation][-longest:])
                rows.append(Encoded((whole,), (min(len(continuation), len(whole) - 1),), _EXAMPLE))
            batch = self._objective.collate(rows)
            log_probs_SK, hits_SK = self._objective.evaluator.token_hits(self._loaded.model, batch)
            counts = [row.answers[0] for row in rows]
            for i, log_probs_K, hits_K, count in zip(part, log_probs_SK.double(), hits_SK, counts, strict=True):
                found[i] = float(log_probs_K.sum()), bool(hits_K[:count].all())
        return found

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Returns the log-likelihood of whole texts, in windows of the model's length that share one token."""
        del disable_tqdm
        found = []
        for (text,) in (request.args for request in requests):
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self._loaded.max_length,
                context_len=1,
            )
            parts = [(None, *make_disjoint_window(window)) for window in windows]
            found.append(sum(value for value, _ in self._loglikelihood_tokens(parts)))
        return found

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Returns the greedy continuation of each text, up to the first of its stops.

        Raises:
            RequestError: a task asks for samples.
        """
        del disable_tqdm
        found = []
        for text, asked in (request.args for request in requests):
            kwargs = normalize_gen_kwargs(asked, MAX_NEW_TOKENS)
            if kwargs.get("do_sample"):
                raise RequestError("lm-eval's task asks for samples, and answers of an engine are greedy here.")
            stops = handle_stop_sequences(kwargs.get("until"), eos=self.tokenizer.decode([self.eot_token_id]))
            most = int(kwargs["max_gen_toks"])
            if most >= self._loaded.max_length:
                raise RequestError(
                    f"lm-eval's task asks for {most} new tokens, and the model takes {self._loaded.max_length} tokens "
                    "for prompt and answer; set max_gen_toks in the task."
                )
            prompt = self.tok_encode(text)[most - self._loaded.max_length :]
            wanted = Continuing(most, [self.eot_token_id], one_line="\n" in stops)
            ((tokens,),) = self._objective.evaluator.continuations(self._loaded.model, self.tokenizer, [prompt], wanted)
            written = self.tokenizer.decode(_before(tokens, self.eot_token_id), skip_special_tokens=True)
            found.append(postprocess_generated_text(written, stops, None))
        return found


def _before(tokens: Sequence[int], end: int) -> list[int]:
    """Returns the tokens before the first that ends the text."""
    return list(tokens[: tokens.index(end)] if end in tokens else tokens)
