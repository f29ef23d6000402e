"""Every schedule has the right numbers and memory, with Python numbers and 0-D tensors, and is a
value: it can be compared, copied and pickled."""

import copy
import inspect
import math
import pickle
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from itertools import pairwise

import pytest
import torch

from sodaopt import schedules
from sodaopt.schedules import (
    Coef,
    Schedule,
    accelerated,
    after,
    coupled,
    debias,
    fade,
    first,
    log_time,
    lr,
    lr_weighted,
    mean,
    over,
    times,
    uniform,
)
from sodaopt.theory.weights import weights
from sodaopt.zoo import coefficients
from sodaopt.zoo.coefficients import falling, mass, nadam_share, nadam_total

LR = (0.1, 0.4, 0.2)


def one(k: float) -> float:
    return 1.0


def ramp(k: float) -> float:
    return k + 1


def square(k: float) -> float:
    return (k + 1) ** 2


def half_then(b: float) -> float:
    """c_m of NAdam when mu is 0.45 at every step, at the step where the product is b."""
    return 0.45 / (1 - b * 0.45)


# psi = 0 makes every mu b/2 = 0.45, so that c_g = 0.55/(1 - 0.45^t).
NADAM = [(0.55 / (1 - P), half_then(P)) for P in (0.45, 0.45**2, 0.45**3)]

TABLE: list[tuple[Coef, tuple[float, ...]]] = [  # at k = 0, 1, 2, ... with lr = LR
    (0.3, (0.3, 0.3, 0.3)),
    (lr, LR),
    (uniform, (1 / 2, 1 / 3, 1 / 4)),
    (mean, (1, 1 / 2, 1 / 3)),
    (accelerated, (2 / 3, 2 / 4, 2 / 5)),
    (over(1, uniform), (2, 3, 4)),
    (times(uniform, lr), (0.05, 0.4 / 3, 0.05)),
    (times(2, 3.0), (6, 6, 6)),
    (over(lr, mean), (0.1, 0.8, 0.6)),
    (first(0.25), (1, 0.25, 0.25)),
    (first(uniform), (1, 1 / 3, 1 / 4)),
    (after(uniform, 1), (0, 1 / 3, 1 / 4)),
    (after(lr, 0), LR),
    (fade(2.0, 1, 3), (2, 2, 1, 0, 0)),
    (fade(mean, 0, 4), (1, (2 + math.sqrt(2)) / 8, 1 / 6, (2 - math.sqrt(2)) / 16, 0)),
    (debias(0.5), (1, 2 / 3, 4 / 7)),
    (debias(0.0), (1, 1, 1)),
    (log_time(3.0), (0.3, 0.6, 0.2)),
    (falling(2.0, 2), (2, 2, 4 / 3)),
    (falling(1.0, 1, 0.5), (1, math.sqrt(1 / 2), math.sqrt(1 / 3))),
    (weights(square).now, (1, 4 / 5, 9 / 14)),
    (weights(square).next, (4 / 5, 9 / 14, 16 / 30)),
    (weights(square).total, (0.1 * 5, 0.4 * 14, 0.2 * 30)),
    (lr_weighted(), (1, 16 / 17, 16 / 33)),
    (lr_weighted(r=1.0, power=1.0), (1, 8 / 9, 12 / 21)),
    (lr_weighted(power=0.0), (1, 1 / 2, 1 / 3)),
    (coupled(uniform), (1 / 2, 1 / 3, 1 / 8)),
    (nadam_share(0.9, 0.0), tuple(g / (g + m) for g, m in NADAM)),
    (nadam_total(0.9, 0.0), tuple(g + m for g, m in NADAM)),
    (mass(0.5), (1, 1.5, 1.75)),
    (mass(0.5, 2.0), (3, 3.5, 3.75)),
]
COEFS = [c for c, _ in TABLE]


def label(c: object) -> str | None:
    if isinstance(c, Schedule):
        return repr(c).replace(" ", "").split("<")[0]
    return getattr(c, "__name__", None)


each = pytest.mark.parametrize("c", COEFS, ids=label)
each_row = pytest.mark.parametrize(("c", "values"), TABLE, ids=label)


def f64(v: float) -> torch.Tensor:
    return torch.tensor(v, dtype=torch.float64)


def run(
    c: Coef, lrs: tuple[float, ...], number: Callable = float, k_number: Callable | None = None
) -> list[float]:
    """The values at k = 0, 1, ..., with everything handed in as `number` makes it."""
    past = {name: number(v) for name, v in schedules.start(c).items()}
    out = []
    for k, rate in enumerate(lrs):
        args = (k_number or number)(k), number(rate)
        past = schedules.advance(c, past, *args)
        out.append(float(schedules.value(c, *args, past)))
    return out


def padded(n: int) -> tuple[float, ...]:
    return LR + LR[-1:] * (n - len(LR))


@each_row
@pytest.mark.parametrize("number", [float, f64], ids=["python", "tensor"])
def test_values(c, values, number) -> None:
    assert run(c, padded(len(values)), number) == pytest.approx(values, rel=1e-13, abs=1e-15)


@each_row
def test_step_of_any_kind(c, values) -> None:
    """k is an int, an int64 or a float32 tensor. lr and the memory are float32."""
    lrs = padded(len(values))
    assert run(c, lrs, float, int) == pytest.approx(values, rel=1e-13, abs=1e-15)
    for k in (torch.tensor, lambda k: torch.tensor(float(k))):
        assert run(c, lrs, torch.tensor, k) == pytest.approx(values, rel=1e-5, abs=1e-6)


@each
def test_long_runs_agree(c) -> None:
    """Python numbers and float64 tensors agree to rounding, also if only lr is a tensor."""
    lrs = tuple(0.1 * abs(math.sin(k / 3)) + 0.01 for k in range(60))
    assert run(c, lrs) == pytest.approx(run(c, lrs, f64), rel=1e-12, abs=1e-15)
    past, mixed = schedules.start(c), []
    for k, rate in enumerate(lrs):
        past = {n: float(v) for n, v in schedules.advance(c, past, k, f64(rate)).items()}
        mixed.append(float(schedules.value(c, k, f64(rate), past)))
    assert mixed == pytest.approx(run(c, lrs), rel=1e-12, abs=1e-15)


@each
def test_is_a_value(c) -> None:
    """Pickles, copies, compares, hashes and prints its fields."""
    for other in (pickle.loads(pickle.dumps(c)), copy.deepcopy(c), copy.copy(c)):
        assert other == c
        assert hash(other) == hash(c)
        assert repr(other) == repr(c)
    assert [other == c for other in COEFS].count(True) == 1
    if is_dataclass(c):
        assert type(c).__name__ in repr(c)
        assert all(f"{f.name}={getattr(c, f.name)!r}" in repr(c) for f in fields(c))
        with pytest.raises(AttributeError):
            setattr(c, fields(c)[0].name, 0.5)


def test_weights_is_a_value() -> None:
    w = weights(ramp)
    assert pickle.loads(pickle.dumps(w)) == copy.deepcopy(w) == w != weights(one)
    assert w.now == weights(ramp).now
    assert len({w.now, w.next, w.total}) == 3
    assert "ramp" in repr(w)


def is_schedule(f: object) -> bool:
    if inspect.isclass(f):
        return issubclass(f, Schedule) and f is not Schedule
    return inspect.isfunction(f) and list(inspect.signature(f).parameters) == ["k", "lr"]


def test_every_schedule_is_in_the_table() -> None:
    named = vars(schedules) | vars(coefficients)
    public = {f for name, f in named.items() if is_schedule(f) and name[0] != "_"}
    assert len(public) >= 15
    assert public <= {c if inspect.isfunction(c) else type(c) for c in COEFS}


# -- closed forms ---------------------------------------------------------------------------------

CLOSED = {  # weights: their now, next and total by name
    one: (mean, uniform, over(lr, uniform)),
    ramp: (times(2, uniform), accelerated, over(lr, times(uniform, accelerated))),
}


@pytest.mark.parametrize("a", CLOSED, ids=label)
@pytest.mark.parametrize("number", [float, f64], ids=["python", "tensor"])
def test_weights_have_closed_forms(a, number) -> None:
    lrs, w = tuple(0.1 / (k + 1) for k in range(30)), weights(a)
    for general, closed in zip((w.now, w.next, w.total), CLOSED[a], strict=True):
        assert run(general, lrs, number) == pytest.approx(run(closed, lrs, number), rel=1e-13)


@pytest.mark.parametrize("a", [one, ramp, square], ids=label)
def test_weights_of_the_paper(a) -> None:
    """alpha = a_k/A_k, alpha_bar = a_{k+1}/A_{k+1}, gamma = eta A_k/(1 - alpha_bar)."""
    w, lrs = weights(a), (0.3,) * 12
    for k, (now, ahead, total) in enumerate(
        zip(*(run(c, lrs) for c in (w.now, w.next, w.total)), strict=True)
    ):
        A = sum(a(i) for i in range(k + 1))
        assert now == pytest.approx(a(k) / A)
        assert ahead == pytest.approx(a(k + 1) / (A + a(k + 1)))
        assert total == pytest.approx(0.3 * A / (1 - ahead))


@pytest.mark.parametrize("number", [float, f64], ids=["python", "tensor"])
class TestLrWeighted:
    @pytest.mark.parametrize("lrs", [(0.3,) * 20, tuple(0.9**k for k in range(20))])
    def test_is_the_mean_while_lr_does_not_rise(self, number, lrs) -> None:
        assert run(lr_weighted(), lrs, number) == pytest.approx([1 / (k + 1) for k in range(20)])

    def test_no_weight_before_the_first_lr(self, number) -> None:
        """A warmup from lr = 0: 0, not 0/0, and then as if the run began there."""
        lrs = (0.0, 0.0, 0.1, 0.2, 0.3, 0.1)
        expected = [0, 0, 1, 4 / 5, 9 / 14, 9 / 23]
        assert run(lr_weighted(), lrs, number) == pytest.approx(expected)

    def test_tiny_lr(self, number) -> None:
        assert run(lr_weighted(), (1e-9,) * 3, number) == pytest.approx([1, 1 / 2, 1 / 3])


@pytest.mark.parametrize("number", [float, f64], ids=["python", "tensor"])
class TestCoupled:
    WARMUP, FALL, STEPS = 5, 8, 20
    LRS = tuple(0.3 * min(1, k / 5, (20 - k) / 8) for k in range(20))
    """A warmup from 0 over 5 steps and a linear warmdown over the last 8."""

    def test_is_the_inner_schedule_times_the_fall_of_lr(self, number) -> None:
        fall = [min(1, (self.STEPS - k) / self.FALL) for k in range(self.STEPS)]
        expected = [0, *(fall[k] / (k + 2) for k in range(1, self.STEPS))]
        assert run(coupled(uniform), self.LRS, number) == pytest.approx(expected, rel=1e-13)

    @pytest.mark.parametrize("lrs", [(0.3,) * 20, tuple(0.1 * (k + 1) for k in range(20))])
    def test_is_the_inner_schedule_while_lr_does_not_fall(self, number, lrs) -> None:
        assert run(coupled(mean), lrs, number) == run(mean, lrs, number)

    def test_no_pull_before_the_first_lr(self, number) -> None:
        lrs = (0.0, 0.0, 0.1, 0.2, 0.0)
        assert run(coupled(0.5), lrs, number) == [0, 0, 0.5, 0.5, 0]

    def test_goes_on_from_saved_memory(self, number) -> None:
        c, whole = coupled(uniform), run(coupled(uniform), self.LRS, number)
        past = schedules.start(c)
        for k in range(14):
            past = schedules.advance(c, past, k, self.LRS[k])
        past = {name: number(v) for name, v in past.items()}
        for k in range(14, self.STEPS):
            args = number(k), number(self.LRS[k])
            past = schedules.advance(c, past, *args)
            assert float(schedules.value(c, *args, past)) == whole[k]

    def test_keeps_the_memory_of_the_inner_schedule(self, number) -> None:
        """lr_weighted remembers the largest lr too, and they share it."""
        c = coupled(lr_weighted())
        assert schedules.start(c) == {"lr_max": 0.0, "weight_sum": 0.0}
        assert run(c, LR, number) == pytest.approx([1, 16 / 17, 8 / 33])


class Halved(lr_weighted):
    """It remembers half the largest lr under the name of the largest lr."""

    def advance(self, past, k, lr):
        return super().advance(past, k, lr / 2)


def test_coupled_refuses_another_largest_lr() -> None:
    with pytest.raises(ValueError, match="lr_max"):
        coupled(Halved())


@pytest.mark.parametrize("b", [0.0, 0.5, 0.9, 0.999])
def test_debias_is_adams_correction(b) -> None:
    """m <- lerp(m, g, debias) is EMA/(1 - b^t)."""
    m, ema, gs = 0.0, 0.0, [math.sin(3 * k + 1) for k in range(50)]
    for k, g in enumerate(gs):
        c = debias(b)(k, 0.1)
        m, ema = (1 - c) * m + c * g, b * ema + (1 - b) * g
        assert m == pytest.approx(ema / (1 - b ** (k + 1)), abs=1e-13)


def test_fade_is_monotone_between_its_ends() -> None:
    v = run(fade(3.0, 5, 15), (0.1,) * 25)
    assert v[:6] == [3.0] * 6
    assert v[10] == pytest.approx(1.5)
    assert v[15:] == [0.0] * 10
    assert all(a > b for a, b in pairwise(v[5:16]))


def test_nadam_is_torchs() -> None:
    """c_g = (1-mu_t)/(1-P_t), c_m = mu_{t+1}/(1-P_{t+1}), mu_t = b (1 - 0.96^(t psi)/2)."""
    b, psi, P = 0.9, 0.004, 1.0
    share, total = (run(c(b, psi), (0.1,) * 30) for c in (nadam_share, nadam_total))
    for k in range(30):
        mu, ahead = (b * (1 - 0.5 * 0.96 ** (t * psi)) for t in (k + 1, k + 2))
        P *= mu
        c_g, c_m = (1 - mu) / (1 - P), ahead / (1 - P * ahead)
        assert share[k] == pytest.approx(c_g / (c_g + c_m))
        assert total[k] == pytest.approx(c_g + c_m)


def test_heavy_ball() -> None:
    """The average with alpha = 1/N is the sum M <- b M + g over its mass. The step is M + a g."""
    b, a, lrs = 0.9, 2.0, tuple(0.1 + 0.01 * k for k in range(30))
    N = mass(b, a)
    alpha, alpha_bar, gamma = (run(c, lrs) for c in (debias(b), over(a, N), times(lr, N)))
    m = M = 0.0
    for k, rate in enumerate(lrs):
        g = math.sin(3 * k + 1)
        m, M = (1 - alpha[k]) * m + alpha[k] * g, b * M + g
        m_bar = (1 - alpha_bar[k]) * m + alpha_bar[k] * g
        assert gamma[k] * m_bar == pytest.approx(rate * (M + a * g), abs=1e-12)


@pytest.mark.parametrize(
    "bad",
    [lambda: debias(1.0), lambda: debias(-0.1), lambda: fade(1.0, 5, 5), lambda: fade(1, -1, 3)],
)
def test_wrong_arguments_are_refused(bad) -> None:
    with pytest.raises(ValueError, match="got"):
        bad()


# -- memory ---------------------------------------------------------------------------------------

REMEMBERING = [c for c in COEFS if schedules.start(c)]
WRAPPERS = {  # how each combination changes a part's value v at step k
    "times": (lambda c: times(c, 2.0), lambda v, k: 2 * v),
    "times, right": (lambda c: times(lr, c), lambda v, k: LR[k] * v),
    "over": (lambda c: over(1.0, c), lambda v, k: 1 / v),
    "over, left": (lambda c: over(c, 2.0), lambda v, k: v / 2),
    "fade": (lambda c: fade(c, 0, 2), lambda v, k: v * (1, 0.5, 0)[k]),
    "first": (first, lambda v, k: v if k else 1),
    "after": (lambda c: after(c, 1), lambda v, k: v if k else 0),
    "nested": (lambda c: times(after(first(c), 0), fade(1.0, 5, 9)), lambda v, k: v if k else 1),
}


@pytest.mark.parametrize("c", REMEMBERING, ids=label)
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("number", [float, f64], ids=["python", "tensor"])
def test_memory_goes_through(c, wrapper, number) -> None:
    wrap, expected = WRAPPERS[wrapper]
    assert schedules.start(wrap(c)) == schedules.start(c)
    assert run(wrap(c), LR, number) == pytest.approx(
        [expected(v, k) for k, v in enumerate(run(c, LR))]
    )


def test_the_same_memory_is_shared() -> None:
    """Two parts with one memory advance it once a step, not twice."""
    w, lrs = weights(ramp), (0.1,) * 9
    both = times(w.now, w.next)
    assert schedules.start(both) == {"A": 0.0}
    assert run(both, lrs) == pytest.approx(
        [a * b for a, b in zip(run(w.now, lrs), run(w.next, lrs), strict=True)]
    )


CLASHES = [
    (weights(one).now, weights(ramp).now),
    (lr_weighted(), lr_weighted(r=1.0)),
    (nadam_share(0.9, 0.004), nadam_share(0.8, 0.004)),
]


@pytest.mark.parametrize(("a", "b"), CLASHES, ids=label)
def test_different_memories_do_not_mix(a, b) -> None:
    """Two parts with different memories of one name give the right values, or an error."""
    try:
        both = run(times(a, b), LR)
    except ValueError:
        return
    assert both == pytest.approx([x * y for x, y in zip(run(a, LR), run(b, LR), strict=True)])


@pytest.mark.parametrize("c", [0.5, lr, times(lr, 2.0)], ids=label)
def test_plain_coefficients_have_no_memory(c) -> None:
    assert schedules.start(c) == {}
    assert schedules.advance(c, {}, 3, 0.1) == {}
