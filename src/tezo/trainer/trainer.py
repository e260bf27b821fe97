"""transformers' Trainer whose steps are those of a zeroth-order method."""

import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Subset
from tqdm.auto import tqdm
from transformers import Trainer
from transformers.trainer import TRAINING_ARGS_NAME

from tezo.directions.random import permutation
from tezo.directions.targets import frozen_notice
from tezo.methods import HEAD_FEEDBACK
from tezo.models.lora import Adapter, make_adapter, save_adapter
from tezo.models.peft import why_not_in_peft
from tezo.models.quantization import stay_packed
from tezo.optim.estimators.estimate import FEEDBACK
from tezo.optim.optimizer import PER_EXAMPLE, ZerothOrderOptimizer
from tezo.runs.checkpoints import Checkpoint
from tezo.system.errors import RequestError
from tezo.system.files import storing, write_file
from tezo.system.progress import showing
from tezo.trainer.loss import StepLoss, TrainerRows
from tezo.trainer.method import (
    OF_TRAINER,
    OptimizerView,
    check_precision,
    check_same,
    forward_only,
)
from tezo.trainer.state import config_of, read_state, restore, save_state
from tezo.training.choices import Choices, resolve
from tezo.training.job import build_method, parse_method
from tezo.training.rows_of_steps import BASIS_ROWS, planned
from tezo.training.settings import Config

logger = logging.getLogger(__name__)


class ForwardPassTrainer(Trainer):  # type: ignore[misc]
    """A Trainer that evaluates the loss of a batch in forward passes, and never its gradient.

    The micro-batches of gradient accumulation are the rows of one step. Checkpoints have the state of the method in
    `tezo_state`. The exact adapter is saved as the model if there is one, else the tuned model.

    Args:
        model: as of Trainer. Its base may be quantised.
        args: as of Trainer; required. See docs/trainer.md for the effect of each field.
        more: further arguments of Trainer.
        method: name of a zeroth-order method, see `tezo methods`, that needs nothing but the loss of a batch.
        method_options: its options, such as lr, rank, rho or targets, and `feedback_first` and `feedback_last`. Others
            are filled in as in `tezo train`, on rows of the training data. The weight decay of `args` counts
            where the options have none.
        named: further arguments of Trainer.

    Attributes:
        tuner: the zeroth-order optimizer; None before `train`. `tuner.merge()` writes the change into the weights.

    Raises:
        RequestError: an argument is about gradients, or the method is unknown.
    """

    def __init__(
        self,
        model: Any = None,
        args: Any = None,
        *more: Any,
        method: str = HEAD_FEEDBACK,
        method_options: Mapping[str, Any] | None = None,
        **named: Any,
    ) -> None:
        self.tuner: ZerothOrderOptimizer | None = None
        self.optimizer: Any = None
        no_gradients = forward_only(args)
        if not isinstance(method_options or {}, Mapping):
            raise RequestError(f"method_options is {method_options!r}; give a dictionary, such as {{'lr': 1e-4}}.")
        asked = {"weight_decay": no_gradients.weight_decay} if no_gradients.weight_decay else {}
        options = asked | dict(method_options or {})
        self._settings = parse_method(method, options, OF_TRAINER)
        self._micro_batches: list[Any] = []
        self._resumed: Checkpoint | None = None
        self._why_not_in_peft: str | None = None
        self._set_aside: list[Any] = []
        try:
            super().__init__(model, no_gradients, *more, **named)
        finally:
            for packed in self._set_aside:
                packed.is_quantized = True
        self._check_arguments()
        check_precision(args, next(p.dtype for p in self.model.parameters() if p.is_floating_point()))

    def _check_arguments(self) -> None:
        """An error where an argument of Trainer is about gradients."""
        if self.optimizer is not None or self.optimizer_cls_and_kwargs is not None:
            raise RequestError(
                "optimizers and optimizer_cls_and_kwargs are not used; give method= and method_options=."
            )
        if self.args.n_gpu > 1:
            raise RequestError(
                f"Trainer would copy the model to {self.args.n_gpu} GPUs; make one visible by CUDA_VISIBLE_DEVICES."
            )

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        # Trainer refuses a quantised model without an adapter beside it; the method's change is that adapter
        if getattr(self.model, "is_quantized", False):
            self.model.is_quantized = False
            self._set_aside.append(self.model)
        if getattr(self.model, "is_loaded_in_4bit", False):
            stay_packed(self.model)  # a checkpoint identifies it by the weights that it computes with

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        del model  # the one of this trainer: it is never wrapped
        if self.optimizer is None:
            for notice in frozen_notice(self.model):
                logger.warning(notice)
            self.tuner = self._made() if self._resumed is None else self._built(self._settings)
            if self._resumed is not None:
                self.tuner.plan = partial(planned, settings=self._settings.train, first=self.tuner.rules[0])
            self.tuner.warn = logger.warning
            logger.info("settings of the method:\n%s", self.tuner.settings)
            self.args.learning_rate = self.tuner.param_groups[0]["lr"]
            self.optimizer = OptimizerView(self.tuner)
        optimizer: torch.optim.Optimizer = self.optimizer
        return optimizer

    def _made(self) -> ZerothOrderOptimizer:
        """The optimizer, with open options filled in."""
        size = self.args.train_batch_size * self.args.gradient_accumulation_steps
        train = replace(
            self._settings.train,
            steps=max(self.state.max_steps, self.args.max_steps, 1),
            batch_size=size,
            seed=self.args.seed,
        )
        rows = None
        if self._rows_at_hand:
            given = self.compute_loss_func is not None or self.label_smoother is not None
            if given and self._settings.method.options.get("directions") == PER_EXAMPLE:
                raise RequestError(
                    "directions is per-example, and the loss is of the whole batch (compute_loss_func, or label "
                    "smoothing); leave one of them out."
                )
            other = self.eval_dataset if _is_indexed(self.eval_dataset) else None
            rows = TrainerRows(self._loss_of_rows, self.train_dataset, other, size, self.args.seed, shared=given)
        found = resolve(Choices(replace(self._settings, train=train)), rows, self._built)
        self._settings = found.config
        for notice in found.notices:
            logger.warning(notice)
        tuner = found.optimizer
        if tuner.unperturbed_loss is None and rows is not None:
            with torch.no_grad():
                tuner.unperturbed_loss = float(rows.loss(0).loss())
        return tuner

    def _built(self, config: Config) -> ZerothOrderOptimizer:
        tuner = build_method(config, self.model, self.args.seed)
        if self._rows_at_hand:
            tuner.set_passes(self._basis_passes)
        return tuner

    @property
    def _rows_at_hand(self) -> bool:
        """Whether training rows can be looked at before they are trained on."""
        return _is_indexed(self.train_dataset)

    def _loss_of_rows(self, dataset: Any, rows: Sequence[int]) -> StepLoss:
        chosen = dataset.select(rows) if hasattr(dataset, "select") else Subset(dataset, rows)
        dropped, self.args.dataloader_drop_last = self.args.dataloader_drop_last, False  # they are fewer than a batch
        try:
            with torch.random.fork_rng(devices=[]):  # a data loader draws a seed
                batches = [self._prepare_inputs(batch) for batch in self.get_test_dataloader(chosen)]
        finally:
            self.args.dataloader_drop_last = dropped
        return StepLoss(self, batches, self._num_items(batches))

    def _num_items(self, batches: list[Any]) -> Any:
        return self.get_batch_samples(iter(batches), len(batches), self.args.device)[1]

    def _basis_passes(self, refresh_step: int) -> None:
        count = len(self.train_dataset)
        rows = permutation(count, seed=self.args.seed, step=refresh_step, name="basis")[:BASIS_ROWS]
        self._loss_of_rows(self.train_dataset, rows).loss()

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Takes a step on the micro-batches since the last one, if this is the last of them.

        Returns the loss of the step, or 0 for a micro-batch that another one follows: Trainer adds them up.
        """
        model.train()  # as Trainer does; a step itself runs in evaluation mode
        self._micro_batches.append(self._prepare_inputs(inputs))
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        batches, self._micro_batches = self._micro_batches, []
        assert self.tuner is not None
        loss, (rule, _) = StepLoss(self, batches, num_items_in_batch), self.tuner.planned(self.tuner.num_steps)
        taken = self.tuner.step(loss.closure(per_example=self.tuner.per_example and rule != FEEDBACK))
        return torch.tensor(taken, device=self.args.device)

    def train(self, *args: Any, **named: Any) -> Any:
        self._micro_batches = []  # a run that was stopped between two of them
        with showing(not self.args.disable_tqdm, write=partial(tqdm.write, file=sys.stderr)):
            return super().train(*args, **named)

    def floating_point_ops(self, inputs: Any) -> int:
        """Of the forward passes of a step; Trainer counts one, and a backward pass of twice as much."""
        passes = 2 * self.tuner.num_directions if self.tuner is not None else 1
        return int(super().floating_point_ops(inputs)) // 3 * passes

    def log(self, logs: dict[str, float], *args: Any, **named: Any) -> None:
        if "loss" in logs and self.tuner is not None:
            logs.pop("grad_norm", None)  # 0: there is no gradient
            logs["forward_passes"] = self.tuner.num_forward_passes
        super().log(logs, *args, **named)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        folder = Path(self.args.output_dir if output_dir is None else output_dir)
        with storing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        write_file(folder / "training_args.json", f"{self.args.to_json_string()}\n".encode())
        adapter = self._exact_adapter(folder)
        if adapter is None:
            super()._save(output_dir, state_dict)  # the model's state dict has the tuned values
            (folder / TRAINING_ARGS_NAME).unlink(missing_ok=True)  # a pickle
            return
        with storing(folder):
            save_adapter(adapter, folder, model=self.model, base=getattr(self.model, "name_or_path", ""))
            if self.processing_class is not None:
                self.processing_class.save_pretrained(folder)

    def _exact_adapter(self, folder: Path) -> Adapter | None:
        """The adapter that was trained; None: the whole model is to be saved, in `folder` too."""
        if self.tuner is None or self.tuner.why_no_adapter() is not None:
            return None
        adapter = make_adapter(self.tuner)
        if self._why_not_in_peft is None:
            self._why_not_in_peft = why_not_in_peft(adapter, self.model, folder) or ""  # the same for each checkpoint
            if self._why_not_in_peft:
                logger.warning("the adapter is not one of PEFT, because %s", self._why_not_in_peft)
        packed = not all(target.is_writable for target in self.tuner.targets)  # then there is no whole model to save
        return adapter if packed or not self._why_not_in_peft else None

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        assert self.tuner is not None
        save_state(Path(output_dir), self.tuner, self._settings)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        del model  # the state has the change, and Trainer loads it after the optimizer is made
        self._resumed = read_state(Path(resume_from_checkpoint))
        saved = config_of(self._resumed, self._settings)
        check_same(saved.method, self._settings.method, resume_from_checkpoint)
        self._settings = saved

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None and self.tuner is not None and self._resumed is not None:
            restore(self.tuner, self._resumed)
            self._resumed = None

    def _load_best_model(self) -> None:
        assert self.tuner is not None
        best = read_state(Path(self.state.best_model_checkpoint))
        self.tuner.load_tuned_state(best.tensors, best.step)


def _is_indexed(dataset: Any) -> bool:
    return hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__") and not isinstance(dataset, Mapping)


class TezoTrainer(ForwardPassTrainer):
    """transformers' Trainer with a zeroth-order method: `TezoTrainer(model, args, method="head-feedback", ...)`.

    See `ForwardPassTrainer` for the arguments, and docs/trainer.md.
    """
