"""Rows with labels whose scores are those of a module, for steps and looks that see each row's outputs."""

import torch
from torch import Tensor, nn

from tezo.directions.outputs import Outputs, Places
from tezo.optim.closures import RowOutputs


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Scores(RowOutputs):
    """Rows of inputs whose scores are those of a module, (rows, classes)."""

    def __init__(self, model: nn.Module, x_NI: Tensor, labels_N: Tensor, held_out: "Scores | None" = None) -> None:
        self.model, self.x_NI, self.labels_N, self._held_out = model, x_NI, labels_N, held_out

    @property
    def held_out(self) -> "Scores | None":
        return self._held_out

    @property
    def tokens(self) -> int:
        return len(self.x_NI)

    def outputs(self, like: Outputs | None = None) -> Outputs:
        del like
        scores_NC = self.model(self.x_NI.unsqueeze(1)).squeeze(1)
        return Outputs(scores_NC, self.labels_N, torch.arange(len(self.x_NI)), shared=True)

    def places(self) -> list[Places]:
        every = torch.arange(len(self.x_NI))
        return [Places(every, torch.zeros_like(every), torch.zeros_like(every), every, every)]

    def losses(self, copies: int) -> Tensor:
        assert copies == 1
        return self.outputs().losses().mean().view(1)


def rows(count: int, inputs: int, classes: int, seed: int) -> tuple[Tensor, Tensor]:
    x_NI = noise(count, inputs, seed=seed)
    labels_N = (x_NI @ noise(inputs, classes, seed=seed + 1) + noise(count, classes, seed=seed + 2)).argmax(1)
    return x_NI, labels_N


def softmax_model(inputs: int = 6, classes: int = 3) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(inputs, classes, bias=False)).double()
    with torch.no_grad():
        model[0].weight.copy_(noise(classes, inputs, seed=5) / 4)
    return model


class Stream40(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(40, 8, bias=False).double()
        self.head_CM = noise(2, 8, seed=95)
        with torch.no_grad():
            self.layer.weight.copy_(noise(8, 40, seed=96) / 40)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) @ self.head_CM.T
