"""The states of the residual stream that a server of vLLM shows, and the inputs of layers that they reveal.

With the connector of its method `extract_hidden_states` a server writes the stream h (T, D) behind some blocks into a
file for each prompt. Let a layer y = W x end such a block. Under an adapter (A, s B) on it, B (D, K) with orthonormal
columns,

    h' = h + s B A x,   A x = B^T (h' - h) / s,

which is K numbers of each input, whatever W is. With K orthonormal random rows A, their part A^T A x stands for the
input: directions of such layers lie in the span of these rows.

A vector n is added to the outputs of a layer for some tokens t of one text by an adapter of rank 1, n v^T, with v^T x_t
near 1 for these tokens and near 0 for the others, by their X = A x (T, K):

    v = A^T X^T (X X^T + lambda I)^-1 e.

K numbers tell few more than K tokens apart: of a long text the vector reaches other tokens too. How far is known, since
v^T x = (A v)^T (A x). No weight of the model is read.
"""

import atexit
import math
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from threading import Lock

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from tezo.directions.ranks import block_of
from tezo.forward.answers import MalformedError
from tezo.forward.engine import EngineLostError

READ = 64
"""K, numbers of an input that are read, at most. Of the inputs of four layers, 64 of 1,536 numbers had 87, 81, 78 % of
other rows of three tasks right, whole inputs 89, 82 and 83 %: a trial that is not committed, on recorded inputs."""
LEAST_IN_SPAN = 0.98
"""Part of the change of a state that lies in the span of B, at least, where a layer ends the block before it."""
LEAST_READ = 0.9
"""The same part later, by one number outside of the span: what is less is of another state than at the start."""
LENGTH = 0.5
"""Size of s B A x, as a part of the size of h."""
OUTPUT = 0.4
"""Size that outputs of a layer are taken to have, as a part of that of h. In SmolLM2-135M they have 0.12 to 0.65."""
NEAR = 0.01
"""lambda, as a part of the median of |A x_t|^2 over the tokens."""
SECONDS_OF_A_FILE = 60.0
"""For how long a file is waited for, which is written behind the answer."""
MOST_LEFT = 64
"""Prompts whose files are removed together."""
SWEEPS = 3
"""Times that files of an answer are looked for."""
SUFFIX, LOCK = ".safetensors", ".lock"


@dataclass(frozen=True)
class StatesFile:
    """A file with the states of a prompt, as an answer names it.

    Attributes:
        path: of the file.
        answer: identifier of the answer, with which the names of its files begin.
        prompts: number of prompts of the request, each of which has such a file in the same folder.
    """

    path: Path
    answer: str
    prompts: int


def load_states(file: StatesFile, tokens: Sequence[int], seconds: float = SECONDS_OF_A_FILE) -> Tensor:
    """Returns the states of a prompt (T, n, D) in float32, and removes their file.

    Raises:
        EngineLostError: it is not there after so many seconds.
        MalformedError: it is of another prompt.
    """
    until, wait = time.monotonic() + seconds, 0.002
    while True:
        with suppress(OSError, SafetensorError):  # not there yet, or not whole
            if not _is_being_written(file.path):
                found = load_file(file.path)
                break
        if time.monotonic() > until:
            _remove(file.path)  # what a full disk has left of it
            raise EngineLostError(f"model.engine: {file.path}, in which a server said states are, cannot be read.")
        time.sleep(wait)
        wait = min(2 * wait, 0.2)
    states, prompt = found.get("hidden_states"), found.get("token_ids")
    if states is not None and prompt is not None:
        _remove(file.path)
    if (
        states is None
        or prompt is None
        or states.ndim != 3
        or prompt.tolist() != [*tokens]
        or len(states) != len(tokens)
    ):
        raise MalformedError(f"states of another prompt in {file.path.name}")
    return states.float()


def _is_being_written(path: Path) -> bool:
    """Returns whether a server holds the lock of a file; it has none where it does not lock."""
    try:
        import fcntl
    except ImportError:  # of another system, where a file that is not whole is noticed by its length
        return False
    try:
        with Path(f"{path}{LOCK}").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def _remove(path: Path) -> None:
    for each in (path, Path(f"{path}{LOCK}")):
        with suppress(OSError):
            each.unlink(missing_ok=True)


@dataclass
class _Left:
    """Files of an answer that are to be removed: how many are still there, and how often they were looked for."""

    folder: Path
    files: int
    sweeps: int = 0


class Leftovers:
    """Files with states of prompts that only log-probabilities were asked of: a server writes them all the same.

    They are removed when there are many, and at the end of the process.
    """

    def __init__(self) -> None:
        self._left: dict[str, _Left] = {}
        self._lock = Lock()
        atexit.register(self.remove)

    def add(self, file: StatesFile) -> None:
        """Notes the files of an answer, unless their folder is not seen here."""
        if not file.path.parent.is_dir():
            return
        with self._lock:
            self._left[file.answer] = _Left(file.path.parent, file.prompts)
            many = sum(left.files for left in self._left.values()) >= MOST_LEFT
        if many:
            self.remove()

    def remove(self) -> None:
        """Removes those files that are there."""
        with self._lock:
            for folder in {left.folder for left in self._left.values()}:
                self._remove_in(folder)
            for left in self._left.values():
                left.sweeps += 1
            self._left = {name: left for name, left in self._left.items() if left.files > 0 and left.sweeps < SWEEPS}

    def _remove_in(self, folder: Path) -> None:
        with suppress(OSError):
            for path in folder.glob(f"*{SUFFIX}"):
                of_answer = (left for name, left in self._left.items() if path.name.startswith(name))
                left = next((left for left in of_answer if left.folder == folder), None)
                if left is not None and not _is_being_written(path):
                    _remove(path)
                    left.files -= 1


@dataclass(frozen=True)
class SeenLayer:
    """A layer whose input can be read.

    Attributes:
        name: of the module.
        state: which of the states stands behind it.
        a_KI: orthonormal rows A.
        b_DK: orthonormal columns B.
        size: s.
        output: root mean square that its outputs are taken to have.
    """

    name: str
    state: int
    a_KI: Tensor
    b_DK: Tensor
    size: float
    output: float

    def adapter(self, part: slice) -> tuple[Tensor, Tensor]:
        """Returns the adapter (A, s B) that reads this part of the K numbers."""
        return self.a_KI[part], self.size * self.b_DK[:, part]

    @cached_property
    def aside(self) -> Tensor:
        """A random unit vector that is orthogonal to the columns of B: along it an adapter changes nothing."""
        draw = torch.Generator().manual_seed(0)
        found_D = torch.randn(len(self.b_DK), generator=draw)
        found_D -= self.b_DK @ (self.b_DK.T @ found_D)
        unit_D: Tensor = found_D / torch.linalg.vector_norm(found_D).clamp_min(1e-30)
        return unit_D

    def along(self, states_TND: Tensor, part: slice) -> Tensor:
        """Returns B^T h for this part of the columns of B, and behind them the one number aside, (T, K + 1)."""
        return states_TND[:, self.state] @ torch.cat([self.b_DK[:, part], self.aside.unsqueeze(1)], 1)

    def is_behind(self, change_TK: Tensor) -> bool:
        """Returns whether the state stands behind the layer, by the changes of `along` under the adapter."""
        inside, aside = change_TK[1:, :-1].square().sum(1).mean(), change_TK[1:, -1].square().mean()
        outside = float(aside) * (len(self.b_DK) - self.b_DK.shape[1])
        return float(inside) > 0 and outside <= (1 / LEAST_READ - 1) * float(inside)

    def stand_in(self, x_TK: Tensor) -> Tensor:
        """Returns the parts of inputs that are known, A^T A x (T, I)."""
        found: Tensor = x_TK @ self.a_KI
        return found

    def for_tokens(self, x_TK: Tensor, wanted_T: Tensor) -> tuple[Tensor, float]:
        """Returns v (I,) with v^T x_t near `wanted_T`, and how far it misses, |v^T x - wanted|^2 / |wanted|^2.

        The mean of v^T x_t over the tokens that are wanted is as it should be. Where no v reaches them, v is zero, and
        misses by infinity.

        Args:
            x_TK: the numbers A x of the tokens of a text.
            wanted_T: v^T x for each token, such as 1 for one and 0 for all others.
        """
        x_TK, wanted_T = x_TK.double(), wanted_T.double()
        gram_TT = x_TK @ x_TK.T
        gram_TT.diagonal().add_(NEAR * float(gram_TT.diagonal().median()) + 1e-12)
        v_K = x_TK.T @ torch.linalg.solve(gram_TT, wanted_T)
        reached = float((x_TK @ v_K) @ wanted_T)
        v_K = v_K * (float(wanted_T @ wanted_T) / reached if reached > 0 else 0.0)
        missed = float((x_TK @ v_K - wanted_T).square().sum() / wanted_T.square().sum())
        return (v_K @ self.a_KI.double()).float(), missed if reached > 0 else math.inf


def ends_of_blocks(model: nn.Module, size: int) -> dict[str, nn.Linear]:
    """Returns the last linear layer of each block, if it has D outputs, by the names of modules."""
    last: dict[str, tuple[str, nn.Linear]] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and block_of(f"{name}.weight") != f"{name}.weight":
            last[block_of(f"{name}.weight")] = name, module
    return {name: module for name, module in last.values() if module.out_features == size}


def orthonormal(rows: int, count: int, seed: int) -> Tensor:
    """Returns random orthonormal columns (rows, count), float32."""
    draw = torch.Generator().manual_seed(seed)
    found: Tensor = torch.linalg.qr(torch.randn(rows, count, generator=draw, dtype=torch.float64)).Q
    return found.float()


def tried_layer(name: str, layer: nn.Linear, number: int, size: float) -> SeenLayer:
    """Returns a layer as it is tried, with s B A x of the size of h where x is of size 1."""
    count = min(READ, layer.in_features, layer.out_features)
    a_KI = orthonormal(layer.in_features, count, 2 * number).T.contiguous().bfloat16().float()  # as a server has it
    b_DK = orthonormal(layer.out_features, count, 2 * number + 1)
    return SeenLayer(name, -1, a_KI, b_DK, size, 0.0)


def placed(tried: SeenLayer, part: slice, before_TND: Tensor, after_TND: Tensor) -> SeenLayer | None:
    """Returns a layer with its place among the states; None: none of them stands behind it.

    Args:
        tried: the layer.
        part: of the K numbers that an adapter has read.
        before_TND: states of a text.
        after_TND: likewise under that adapter.
    """
    change_TND = (after_TND - before_TND)[1:]  # the first token's input may be far larger than all others
    within_TNK = change_TND @ tried.b_DK[:, part]
    size_N = change_TND.square().sum((0, 2)).sqrt()
    share_N = within_TNK.square().sum((0, 2)).sqrt() / size_N.clamp_min(1e-30)
    state = int(share_N.nan_to_num(-1.0).argmax())
    if not (torch.isfinite(size_N[state]) and float(size_N[state]) > 0 and float(share_N[state]) >= LEAST_IN_SPAN):
        return None
    h_TD = before_TND[1:, state]
    sizes_T = change_TND[:, state].square().sum(1).sqrt()
    longer = LENGTH * float(h_TD.square().sum(1).sqrt().median()) / max(float(sizes_T.median()), 1e-30)
    rms = float(h_TD.square().mean(1).sqrt().median())
    return SeenLayer(tried.name, state, tried.a_KI, tried.b_DK, tried.size * longer, OUTPUT * rms)
