"""What optimizers of this library have in common: they are bound to one model as it was when they were made."""

from collections.abc import Sequence
from typing import Any, NoReturn

from tezo.directions.targets import Target
from tezo.errors import RequestError


class BoundToModel:
    """Mix-in for optimizers. By hooks, and by state of its dtype and device, an optimizer belongs to its model."""

    def bind(self, targets: Sequence[Target]) -> None:
        """Notes what the parameters are like; `check_bound` compares.

        Raises:
            RequestError: a parameter was made under `torch.inference_mode`, so that nothing may write it outside.
        """
        for target in targets:
            if target.parameter.is_inference():
                raise RequestError(
                    f"{target.name} was made under torch.inference_mode, so it cannot be tuned; make or load the model "
                    "outside of it."
                )
        self._bound = [(target, target.parameter.dtype, target.parameter.device) for target in targets]

    def check_bound(self) -> None:
        """Raises a `RequestError` if the parameters have another dtype or device than when `bind` was called."""
        for target, *before in self._bound:
            now = [target.parameter.dtype, target.parameter.device]
            if now != before and target.parameter.is_floating_point():
                old, new = (f"{dtype} on {device}" for dtype, device in (before, now))
                raise RequestError(
                    f"{target.name} was {old} when the optimizer was made, and is {new}; make a new optimizer after "
                    "such a change."
                )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuses `copy.deepcopy` and `pickle`: a copy would have neither hooks nor a model of its own."""
        raise RequestError(
            "an optimizer is bound to its model, and cannot be copied or pickled; make one over the other model, and "
            "give it the state by load_state_dict(optimizer.state_dict())."
        )
