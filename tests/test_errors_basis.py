"""The basis of errors: what a look measures and foretells, and the directions that it proposes."""

import math
from dataclasses import replace

import pytest
import torch
from folders import completion_rows, label_rows, model_folder, write_rows
from label_scores import Scores, Stream40, noise, rows, softmax_model
from safetensors.torch import load, save
from torch import Tensor, nn

from tezo.directions.bases.basis import DataBasis, Factors, Source
from tezo.directions.outputs import Outputs, Places, fitted_bias
from tezo.directions.targets import select_targets
from tezo.methods.gauss_newton import gauss_newton
from tezo.newton import labels as regressions
from tezo.newton import look as looking
from tezo.newton.labels import PLACES_OF_A_DIRECTION, Layout, common, contrasts, regress
from tezo.newton.look import ErrorBasis
from tezo.newton.recording import CONSTANT_RIDGES, AddedVectors, Inputs, Tokens, _Adding
from tezo.system.errors import RequestError
from tezo.training.job import prepare
from tezo.training.rows_of_steps import looked_and_stepped
from tezo.training.settings import parse_config


def ridge_regression(x: Tensor, e: Tensor, ridge: float) -> Tensor:
    """W, in the primal form."""
    scaled = ridge * float((x @ x.T).diagonal().mean())
    return torch.linalg.solve(x.T @ x + scaled * torch.eye(x.shape[1], dtype=torch.float64), x.T @ e)


def test_a_regression_is_of_the_lambda_with_the_best_signal_of_unseen_places():
    x, e = noise(30, 12, seed=40), noise(30, 2, seed=41)
    x, e = x - x.mean(0), e + x @ noise(12, 2, seed=42)
    e = e - e.mean(0)
    signals = {}
    for ridge in regressions.RIDGES:
        scaled = ridge * float((x @ x.T).diagonal().mean())
        unseen = torch.empty_like(e)
        for i in range(30):  # each place by the regression of all others, with their means and this lambda
            kept = torch.arange(30) != i
            x_kept, e_kept = x[kept] - x[kept].mean(0), e[kept] - e[kept].mean(0)
            gram = x_kept.T @ x_kept + scaled * torch.eye(12, dtype=torch.float64)
            unseen[i] = (x[i] - x[kept].mean(0)) @ torch.linalg.solve(gram, x_kept.T @ e_kept)
        signals[ridge] = float((unseen * e).sum() / unseen.norm() / e.norm()), unseen
    (found,) = regress([x.float()], e)
    ridge = max(signals, key=lambda own: signals[own][0])
    assert found.signal == pytest.approx(signals[ridge][0], abs=1e-4)
    assert torch.allclose(found.unseen_PE, signals[ridge][1], atol=1e-4)
    assert torch.allclose(found.w_IE.double(), ridge_regression(x, e, ridge), atol=1e-4)
    turns = contrasts(3)[:2]
    v = found.along(turns)
    assert torch.allclose((x @ v).square().mean(0), torch.ones(2, dtype=torch.float64), rtol=1e-4)
    for own, expected in zip(v.T, (found.w_IE.double() @ turns).T, strict=True):
        assert torch.cosine_similarity(own, expected, 0) > 1 - 1e-5


def test_noise_carries_no_signal():
    x, e = noise(200, 300, seed=50).float(), noise(200, 1, seed=51)
    (found,) = regress([x], e)
    # the best of five lambdas, each within 99.98 % of a correlation of independent numbers
    assert abs(found.signal) < 3.7 / math.sqrt(200)


def test_noise_carries_no_signal_of_few_places_either(monkeypatch):
    # centred inputs of few places are nearly minus the sum of the others, and errors are too
    monkeypatch.setattr(regressions, "RIDGES", (1.0,))
    signals = [regress([noise(12, 300, seed=s).float()], noise(12, 1, seed=1000 + s))[0].signal for s in range(200)]
    mean, deviation = sum(signals) / 200, torch.tensor(signals).std().item() / math.sqrt(200)
    assert abs(mean) < 3.3 * deviation  # within 99.9 %
    assert deviation < 0.05


def test_what_layers_say_together_is_nearer_the_truth_than_what_any_says():
    truth = noise(300, 1, seed=52) @ torch.tensor([[1.0, -1.0]], dtype=torch.float64)
    layers = [regress([(truth @ noise(2, 20, seed=s) + 3 * noise(300, 20, seed=s + 1)).float()],
                      truth + noise(300, 2, seed=53))[0] for s in (54, 56, 58, 60)]  # fmt: skip
    turns, weights = common(layers, 1)
    assert torch.allclose(turns[:, 0].abs(), torch.full((2,), 0.5**0.5, dtype=torch.float64), atol=0.1)
    assert weights.tolist() == [1.0]

    def correlation(values: Tensor) -> float:
        return abs(float(torch.corrcoef(torch.stack([values, truth[:, 0]]))[0, 1]))

    single = [correlation(own.unseen_PE @ turns[:, 0]) for own in layers]
    together = sum(own.unseen_PE / own.unseen_PE.norm() for own in layers)
    assert correlation(together @ turns[:, 0]) > max(single)


class Stream(nn.Module):
    """Layers that write to a stream, one that only reads it, and scores of the stream's end."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inside, self.last = (nn.Linear(5, 5, bias=False).double() for _ in range(3))
        self.head_CM = noise(3, 5, seed=60)
        with torch.no_grad():
            for i, layer in enumerate((self.first, self.inside, self.last)):
                layer.weight.copy_(noise(5, 5, seed=61 + i) / 4)

    def forward(self, x: Tensor) -> Tensor:
        h = x + self.first(x)
        h = h + self.last(torch.tanh(0.02 * self.inside(h)))
        return h @ self.head_CM.T


@torch.no_grad()
def test_vectors_that_raise_a_class_are_measured_and_the_layers_that_write_the_stream_found():
    model = Stream()
    x, labels = rows(60, 5, 3, seed=70)
    closure = Scores(model, x, labels)
    targets = {t.name: t for t in select_targets(model, ("all",))}
    added = AddedVectors(model, closure, closure.outputs(), 0)
    for depths in (1, 2):
        found = added.class_vectors([*targets.values()], lambda _: 1.0, depths)
        assert found.layers == ["first.weight", "last.weight"]
        first, last = found.vectors.values()
        assert (first is last) == (depths == 1) and first.shape == last.shape == (1, 5, 3)
        for (vectors_MC,) in found.vectors.values():
            raised = model.head_CM @ vectors_MC  # (C, C): what each vector does
            raised = raised - raised.mean(0)
            assert torch.allclose(raised.diagonal(), torch.full((3,), 2 / 3, dtype=torch.float64), atol=0.05)
            assert bool((raised.argmax(0) == torch.arange(3)).all())


class Mixing(nn.Module):
    """Scores of the last token, to which the tokens before it are carried through other weights."""

    def __init__(self) -> None:
        super().__init__()
        self.early, self.late = (nn.Linear(6, 6, bias=False).double() for _ in range(2))
        self.carry_MM, self.head_CM = noise(6, 6, seed=66), noise(2, 6, seed=67)

    def forward(self, x_RLI: Tensor) -> Tensor:
        h_RLM = x_RLI + self.early(x_RLI)
        h_RLM = torch.cat([h_RLM[:, :-1], h_RLM[:, -1:] + h_RLM[:, :-1].mean(1, keepdim=True) @ self.carry_MM.T], 1)
        return (h_RLM + self.late(h_RLM))[:, -1] @ self.head_CM.T


class LastToken(Scores):
    """Rows of tokens, scored at the last one, and averaged up to it."""

    def outputs(self, like: Outputs | None = None) -> Outputs:
        del like
        return Outputs(self.model(self.x_NI), self.labels_N, torch.arange(len(self.x_NI)), shared=True)

    def places(self) -> list[Places]:
        every, length = torch.arange(len(self.x_NI)), self.x_NI.shape[1]
        return [Places(every, torch.full_like(every, length - 1), torch.full_like(every, length), every, every)]


@torch.no_grad()
@pytest.mark.parametrize("count", [20, 300])
def test_other_tokens_have_vectors_of_their_own_at_layers_that_they_act_through(count):
    model = Mixing()
    targets = {t.name: t for t in select_targets(model, ("all",))}
    closure = LastToken(model, noise(count, 4, 6, seed=72), torch.arange(count) % 2)
    added = AddedVectors(model, closure, closure.outputs(), 0)
    early = added.measured(targets["early.weight"], 1.0, Tokens.OTHERS)
    late = (torch.eye(6, dtype=torch.float64) + model.late.weight).T @ model.head_CM.T  # gradient at the last token
    gradients = {Tokens.PLACE: late, Tokens.OTHERS: model.carry_MM.T @ late}
    for tokens, gradient_MC in gradients.items():
        found = added.measured(targets["early.weight"], 1.0, tokens)
        raised = gradient_MC.T @ found  # by what is added to these tokens, in each row
        contrast = raised - raised.mean(0)
        assert torch.allclose(contrast, torch.eye(2, dtype=torch.float64) - 0.5, atol=0.1), tokens
    assert not torch.allclose(early, added.measured(targets["early.weight"], 1.0, Tokens.PLACE), atol=0.1)
    vectors = added.class_vectors([*targets.values()], lambda _: 1.0, 2)
    assert not bool(vectors.vectors[vectors.layers[-1]][1].any())  # behind it no other token is read
    assert vectors.reach(vectors.layers[-1])[1] == 0


def test_all_rows_of_an_example_have_its_vector_at_the_place():
    # two rows of example 0, which begin alike and are read in the first, and one of example 2
    places = Places(torch.tensor([0, 2]), torch.tensor([3, 1]), torch.tensor([4, 2]), torch.arange(2),
                    torch.tensor([0, 0, 2]))  # fmt: skip
    vectors = noise(3, 5, seed=77)
    for tokens in Tokens:
        added_RLM = _Adding({"layer": vectors}, tokens).added("layer", places, 6)
        for row, (example, place) in enumerate([(0, 3), (0, 3), (2, 1)]):
            is_moved = added_RLM[row].abs().sum(1) > 0
            assert is_moved.tolist() == [(at == place) == (tokens is Tokens.PLACE) for at in range(6)]
            assert torch.equal(added_RLM[row][is_moved][0], vectors[example])


@torch.no_grad()
def test_vectors_that_do_not_foretell_scores_are_none():
    model = Mixing()
    model.carry_MM.zero_()  # what other tokens have is not read
    closure = LastToken(model, noise(300, 4, 6, seed=72), torch.arange(300) % 2)
    added = AddedVectors(model, closure, closure.outputs(), 0)
    (target,) = select_targets(model, ("early.weight",))
    assert not bool(added.measured(target, 1.0, Tokens.OTHERS).any())
    assert bool(added.measured(target, 1.0, Tokens.PLACE).any())


@torch.no_grad()
@pytest.mark.parametrize("count", [1, 2, 4])
def test_fewer_places_than_layers_are_passed_until_each_layer_is_tried(count):
    model = Stream()
    closure = Scores(model, *rows(count, 5, 3, seed=71))
    targets = {t.name: t for t in select_targets(model, ("all",))}
    added = AddedVectors(model, closure, closure.outputs(), 0)
    found = added.class_vectors([*targets.values()], lambda _: 1.0, 2)
    assert all(bool(each.isfinite().all()) for each in found.vectors.values())
    assert found.layers == ["first.weight", "last.weight"]


@pytest.mark.parametrize(("classes", "kinds", "rank"), [(2, 2, 16), (6, 2, 16), (8, 2, 16), (8, 1, 6), (2, 2, 3)])
def test_columns_have_one_meaning_and_directions_are_proposed_along_all_of_them(classes, kinds, rank):
    layout = Layout.of(classes, kinds, rank, 400)
    used = [column for kind in range(kinds) for column in range(rank)[layout.columns(kind)]]
    biases = list(range(rank)[layout.bias])
    assert sorted([*used, *biases]) == list(range(len(used) + len(biases))) and len(used) + len(biases) <= rank
    assert layout.biases == (classes - 1 if classes - 1 <= rank // 3 else 1) and 1 <= layout.contrasts <= classes - 1
    proposed = layout.proposals(torch.linspace(1, 0.5, layout.contrasts, dtype=torch.float64), rank)
    assert proposed.shape == (layout.biases + kinds + layout.contrasts * (layout.contrasts > 1), rank)
    assert bool(proposed[:, used + biases].any(0).all()), "a column that no direction moves"
    assert not bool(proposed[: layout.biases][:, used].any()) and not bool(proposed[layout.biases :][:, biases].any())
    assert torch.allclose(contrasts(classes).sum(0), torch.zeros(classes - 1, dtype=torch.float64), atol=1e-12)


def test_contrasts_have_directions_of_their_own_only_of_enough_places():
    few, many = (Layout.of(6, 2, 16, places) for places in (12 * PLACES_OF_A_DIRECTION - 1, 12 * PLACES_OF_A_DIRECTION))
    weights_R = torch.linspace(1, 0.5, 5, dtype=torch.float64)
    assert (few.contrasts, few.biases) == (many.contrasts, many.biases) == (5, 5)
    assert torch.equal(many.proposals(weights_R, 16)[:7], few.proposals(weights_R, 16))
    assert many.proposals(weights_R, 16).shape == (12, 16)


def test_of_many_classes_the_bias_that_fits_best_is_one_column():
    labels = torch.randint(12, (400,), generator=torch.Generator().manual_seed(7))
    scores = noise(400, 12, seed=73) + 3 * noise(12, seed=74)
    outputs = Outputs(scores, labels, torch.arange(400), shared=True)
    layout = Layout.of(12, 2, 16, 400)
    (bias_C,) = layout.biases_of(outputs).T
    assert (layout.biases, layout.contrasts) == (1, 7)
    longest = float(fitted_bias(outputs).norm())
    moved = replace(outputs, scores_TC=scores + longest * bias_C)
    assert float(fitted_bias(moved).abs().max()) < 1e-4 < moved.loss() < outputs.loss()
    every = Layout.of(4, 2, 16, 400).biases_of(Outputs(scores[:, :4], labels % 4, torch.arange(400), shared=True))
    assert torch.equal(every, contrasts(4))


@pytest.mark.parametrize("rank", [1, 2, 3, 4, 16])
@pytest.mark.parametrize("classes", [2, 6, 12])
@pytest.mark.parametrize("kinds", [1, 2])
def test_every_rank_has_columns_and_directions_along_them(rank, classes, kinds):
    layout = Layout.of(classes, kinds, rank, 400)
    assert layout.contrasts >= 1 and layout.biases <= rank // 3 and layout.bias.stop <= max(rank, kinds)
    proposed = layout.proposals(torch.ones(layout.contrasts, dtype=torch.float64)[:rank], rank)
    assert proposed.shape[1] == rank and bool(proposed.any(0)[: layout.bias.stop].all())


def test_a_look_that_sees_what_is_wrong_mends_it_with_few_directions():
    # 40 inputs, of which two tell the labels: random factors of rank 6 hardly meet them
    ends = {}
    for basis in ("errors", "gaussian"):
        model = Stream40()
        x = noise(400, 40, seed=90)
        labels = (x[:, 3] - x[:, 17] > 0).long()
        step, other = Scores(model, x[:160], labels[:160]), Scores(model, x[160:320], labels[160:320])
        unseen = Scores(model, x[320:], labels[320:])
        optimizer = gauss_newton(model, num_directions=6, rank=6, basis=basis, rho=0.02, targets=("all",))
        optimizer.set_rows(lambda *_, other=other: other)
        optimizer.step(step)
        assert len(optimizer.last_step.probes) == (2 if basis == "errors" else 6)  # a bias, and the predictions
        ends[basis] = unseen.outputs().loss()
        optimizer.close()
    assert ends["errors"] < 0.45 < 0.6 < ends["gaussian"]


def test_the_prediction_without_a_row_is_that_of_the_regression_of_the_others():
    x, e = noise(30, 12, seed=40), noise(30, 3, seed=41)
    x, e = x - x.mean(0), e + x @ noise(12, 3, seed=42)
    e = e - e.mean(0)
    (found,) = regress([x.float()], e)
    turns = contrasts(3)
    fitted, without = found.predicted(turns)
    assert torch.allclose(fitted, x @ found.along(turns), atol=1e-4)
    assert torch.allclose(fitted.square().mean(0), torch.ones(2, dtype=torch.float64), rtol=1e-4)
    assert torch.allclose(without * (x @ found.w_IE.double() @ turns).square().mean(0).sqrt(), found.unseen_PE @ turns)


def test_what_varies_of_inputs_has_no_part_along_their_averages():
    inputs = Inputs()
    kinds = [noise(30, 12, seed=43 + kind) + 20 * noise(12, seed=45 + kind) for kind in range(2)]
    for part in (slice(0, 11), slice(11, 30)):
        inputs.add(*(kind[part] for kind in kinds), torch.arange(30)[part])
    averages = torch.stack([kind.mean(0) for kind in kinds], 1)
    along = torch.linalg.qr(averages).Q
    for whole, found in zip(kinds, inputs.varying(), strict=True):
        assert (found.double() @ along).abs().max() < 1e-2  # inputs are kept in half precision
        assert torch.allclose(whole - whole @ along @ along.T, found.double(), atol=3e-2)


@pytest.mark.parametrize("common", [3.0, 0.0])
def test_the_constant_input_is_the_ridge_regression_of_one_that_predicts_it_best_elsewhere(common):
    x, inputs = noise(30, 12, seed=47) + common * noise(12, seed=48), Inputs()
    inputs.add(x[:11], None, torch.arange(11))
    inputs.add(x[11:], None, torch.arange(11, 30))

    def fitted(rows: Tensor, ridge: float) -> Tensor:
        added = ridge * float(x.square().sum(1).mean()) * torch.eye(12, dtype=torch.float64)
        return torch.linalg.solve(rows.T @ rows + added, rows.sum(0))

    def missed(ridge: float) -> float:
        others = [torch.cat([x[:i], x[i + 1 :]]) for i in range(30)]
        return sum((1 - float(x[i] @ fitted(rows, ridge))) ** 2 for i, rows in enumerate(others))

    chosen = min(CONSTANT_RIDGES, key=missed)
    assert chosen == (CONSTANT_RIDGES[0] if common else CONSTANT_RIDGES[-1])
    w, found = fitted(x, chosen), x @ inputs.constant()
    assert torch.allclose(found, x @ w / (x @ w).mean(), atol=1e-2 if common else 0.1)  # kept in half precision
    if common:
        mean = x @ x.mean(0)
        assert found.std() < (mean / mean.mean()).std()


def test_what_foretells_rows_moves_no_class_as_a_whole():
    x, coefficients = noise(200, 40, seed=90), noise(40, seed=91)
    labels = (x @ coefficients > 0).long()
    x = x + 4 * noise(40, seed=92)
    model = Stream40()
    optimizer = gauss_newton(model, rank=6, rho=0.02, targets=("all",))
    optimizer.step(Scores(model, x, labels))
    moved = x @ optimizer.basis.at(0).inputs["layer.weight"][:, :1]
    assert moved.mean().abs() < 1e-2 * moved.square().mean().sqrt()
    optimizer.close()


def test_rows_without_a_signal_are_looked_at_and_a_layer_without_one_has_no_part():
    # of labels that nothing foretells the best signal is often negative, as one left out has the others against it
    signals, foretelling = [], slice(0, 1)
    for seed in range(6):
        model, x = Stream40(), noise(48, 40, seed=seed)
        labels = torch.randint(2, (48,), generator=torch.Generator().manual_seed(seed))
        optimizer = gauss_newton(model, rank=6, rho=0.02, targets=("all",))
        optimizer.step(Scores(model, x, labels))
        basis = optimizer.basis
        signals += basis.at(0).signals.values()
        assert bool(basis.at(0).inputs["layer.weight"][:, foretelling].any()) == (signals[-1] > 0)
        optimizer.close()
    assert len(signals) == 6 and min(signals) < 0 < max(signals)


def test_what_raises_labels_is_measured_once_and_inputs_at_each_step():
    model, x = Stream40(), noise(400, 40, seed=90)
    labels = (x[:, 3] - x[:, 17] > 0).long()
    optimizer = gauss_newton(model, rank=6, rho=0.02, targets=("all",))
    basis, found = optimizer.basis, []
    optimizer.set_rows(lambda step, count: Scores(model, x[step * 10 : step * 10 + count], labels[step * 10 :][:count]))
    for step in range(3):
        optimizer.step(Scores(model, x[300:], labels[300:]))
        found.append((basis.cost[0], basis.at(step)))
    # outputs, four passes of 32 rows with random vectors, four with S, and more rows
    assert [calls for calls, _ in found] == [10, 11, 12]
    first, *later = (look for _, look in found)
    for look in later:
        assert first.class_vectors.layers == look.class_vectors.layers
        for name, vectors in first.class_vectors.vectors.items():
            assert torch.equal(vectors, look.class_vectors.vectors[name])
        assert not torch.equal(first.inputs["layer.weight"], look.inputs["layer.weight"])
    save({key: own for key, own in optimizer.resumable_state().items() if isinstance(own, Tensor)})  # none is shared
    optimizer.close()


@torch.no_grad()
@pytest.mark.parametrize("shift", [0.0, 4.0])
def test_what_raises_labels_is_measured_anew_where_they_need_a_bias_still(shift):
    model, x = Stream40(), noise(400, 40, seed=90)
    labels = (x[:, 3] - x[:, 17] > 0).long()
    optimizer = gauss_newton(model, rank=6, rho=0.02, targets=("all",))
    basis, found, calls = optimizer.basis, [], []
    optimizer.set_rows(lambda _, count: Scores(model, x[:count], labels[:count]))
    for step in range(3):
        if step == 2:  # something else makes one label likelier everywhere
            model.register_forward_hook(lambda _, __, scores: scores + torch.tensor([shift, 0.0]))
        optimizer.step(Scores(model, x[300:], labels[300:]))
        found.append(basis.at(step).class_vectors.vectors["layer.weight"])
        calls.append(basis.cost[0])
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[1], found[2]) == (not shift) and calls == [10, 11, 22 if shift else 12]
    optimizer.close()


@pytest.mark.parametrize(("shift", "expected"), [(0.0, False), (0.5, False), (3.0, True)])
def test_labels_need_a_bias_where_it_lowers_the_loss_by_a_tenth(shift, expected):
    x, labels = rows(400, 6, 2, seed=70)
    scores = x @ noise(6, 2, seed=71) / 4 + torch.tensor([shift, 0.0])
    own = Outputs(scores - fitted_bias(Outputs(scores - torch.tensor([shift, 0.0]), labels, labels, shared=True)),
                  labels, torch.arange(400), shared=True)  # fmt: skip
    assert regressions.is_biased(own) == expected


def test_rows_that_are_all_seen_by_the_first_look_are_not_looked_at_again(monkeypatch):
    model, x = Stream40(), noise(200, 40, seed=90)
    labels = (x[:, 3] - x[:, 17] > 0).long()
    factors = []
    for count, calls in ((256, 3), (200, 4)):  # 200: as if there were more than the first look wants
        monkeypatch.setattr(looking, "LEAST_ROWS", count)
        optimizer = gauss_newton(model, rank=6, rho=0.02, targets=("all",))
        basis = optimizer.basis
        optimizer.set_rows(lambda *_: Scores(model, x, labels))
        optimizer.refresh()
        factors.append(basis.at(0).to_tensors())
        assert basis.cost[0] == calls
        optimizer.close()
    for name, value in factors[0].items():
        assert torch.equal(value, factors[1][name]), name


def job_of(folder, file: str, hold_out: float, family: str = "opt"):
    return prepare(parse_config({"model": {"name": str(folder / file / family)},
                                 "data": {"train": str(folder / f"{file}.jsonl"), "hold_out": hold_out,
                                          "test": str(folder / f"{file}.jsonl")},
                                 "method": {"name": "gauss-newton"}, "train": {"batch_size": 8}}))  # fmt: skip


def test_a_look_has_the_rows_of_its_step_first_where_dev_rows_judge_and_others_elsewhere(tmp_path):
    write_rows(tmp_path / "labels.jsonl", label_rows(160))
    write_rows(tmp_path / "texts.jsonl", completion_rows(160))
    for file, hold_out in (("labels", 0.25), ("labels", 0), ("texts", 0.25), ("texts", 0)):
        model_folder(tmp_path / file, "opt")
        job, both = job_of(tmp_path, file, hold_out), bool(hold_out)
        assert len(job.train) == 160 * (1 - hold_out)
        looked, stepped = looked_and_stepped(job.config, len(job.train), judged=bool(job.dev))
        assert looked == stepped == range(120) if both else not {*looked} & {*stepped}
        basis, rows_of = job.optimizer.basis, job.optimizer._rows
        for step in (0, 3):
            own = job.objective.closure(job.model, job.batches(job.sampler().rows(step))).outputs()
            rows = rows_of(step, 20)
            with torch.no_grad():
                seen = rows.outputs()
                basis.refresh(step, Source(job.model, None, rows_of))
            told = basis.predictions(step)
            assert len(seen.example_T.unique()) == min(20, len(looked))
            assert rows.stepped == (8 if both else 0)
            assert (rows.held_out is None) == (file == "labels" or not hold_out)
            if rows.held_out is not None:  # what a fit ends by is what nothing is fitted to
                dev = job.objective.closure(job.model, job.objective.batches(job.dev[:20], 20))
                with torch.no_grad():
                    assert rows.held_out.outputs().loss() == pytest.approx(dev.outputs().loss(), rel=1e-5)
            if both and file == "labels":
                first = seen.scores_TC[seen.example_T.argsort()][:8]
                assert torch.allclose(first, own.scores_TC[own.example_T.argsort()], atol=1e-5)
            assert (told is None) == (file == "texts") and (told is None or len(told.fitted_ECJ) == rows.stepped)
        job.optimizer.close()


class Turned(DataBasis[Factors]):
    """Factors whose columns lie one behind the other."""

    def compute(self, refresh_step, source):
        del refresh_step, source
        return Factors(inputs={target.name: noise(3, 40, seed=1).double().T for target in self._targets})

    def read(self, stored):
        return Factors(inputs=stored.tensors, passes=stored.passes)


def test_factors_that_are_found_lie_in_memory_as_those_that_are_read_again():
    found, again, model = Turned(), Turned(), Stream40()
    for basis in (found, again):
        basis.prepare(select_targets(model, ["layer.weight"]), {"layer.weight": 3})
    found.refresh(0, Source(model, None, None))
    state = found.state()
    again.load_state(load(save({name: tensor.contiguous() for name, tensor in state.items()})))
    tensors = [basis.at(0).inputs["layer.weight"] for basis in (found, again)]
    assert torch.equal(*tensors) and tensors[0].stride() == tensors[1].stride()


def test_a_basis_without_rows_says_what_to_do():
    optimizer = gauss_newton(softmax_model(), rank=2)
    with pytest.raises(RequestError, match=r"optimizer\.set_rows"):
        optimizer.refresh()
    assert isinstance(optimizer.basis, ErrorBasis)
    optimizer.close()


def test_rows_with_options_of_their_own_are_refused_in_a_sentence():
    class OwnOptions(Scores):
        def outputs(self, like: Outputs | None = None) -> Outputs:
            return replace(super().outputs(like), shared=False)

    model, (x, labels) = Stream40(), rows(32, 40, 2, seed=0)
    optimizer = gauss_newton(model, rank=6, targets=("all",))
    with pytest.raises(RequestError, match=r"per-row options.*method\.name=head-feedback, or method\.basis=gaussian"):
        optimizer.step(OwnOptions(model, x, labels))
    optimizer.close()


def test_what_a_look_finds_does_not_depend_on_how_rows_are_cut_into_passes(tmp_path):
    write_rows(tmp_path / "labels.jsonl", label_rows(48, seed=3))
    model_folder(tmp_path / "labels", "llama")
    found = []
    for most in (64, 3):
        job = job_of(tmp_path, "labels", 0.25, "llama")
        batches = job.objective.batches(job.train, most)
        job.optimizer.set_rows(lambda *_, job=job, batches=batches: job.objective.closure(job.model, batches))
        job.optimizer.refresh()
        found.append(job.optimizer.basis.at(0).inputs)
        job.optimizer.close()
    for name in (name for name in found[0] if name.endswith("weight") and found[0][name].any()):
        assert (found[0][name] - found[1][name]).norm() < 1e-2 * found[0][
            name
        ].norm()  # inputs are kept in half precision
