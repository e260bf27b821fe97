"""The bound of Theorem 2 with its constants: as the paper prints it, and as its proof gives it once mended.

W is M x N and W_{t+1} = W_t - eta G with G = (1/r) kappa Z the estimate of step t, Z = sum_s tau_s u_s v_s^T. tau, u
and v are drawn afresh in every step. The gradient of f(., xi) has the Lipschitz constant lambda and the variance
sigma^2, and D_0 = f(W_0) - min f. For eta <= 1 / (lambda (delta + 1)) the paper's proof arrives at

    (1/T) sum_t E|grad f(W_t)|^2 <= X = 2 D_0 / (eta T) + eta lambda (B + (delta + 1) sigma^2),
    B = rho^2 lambda^2 delta_rho.

Let L be the limit of G for rho -> 0, and A = G - L. By Theorem 1, E L = grad f and
E|L|^2 <= (delta + 1) (|grad f|^2 + sigma^2). By smoothness |A| <= rho lambda |Z|^3 / (2 r), and as
|Z|^2 <= r sum_s tau_s^2 |u_s|^2 |v_s|^2, E|A|^2 <= B with

    delta_rho = (r / 4) E(sum_s tau_s^2 |u_s|^2 |v_s|^2)^3.

For u ~ N(0, I_M), E|u|^4 = M (M + 2) and E|u|^6 = M (M + 2) (M + 4); the paper has other values. It also takes
E G = grad f and E|G - grad f|^2 <= E|A|^2 + E|L - grad f|^2, which hold in the limit rho -> 0 only: neither E A nor
E<A, L> is zero. Young's inequality accounts for both. For every h in (0, 1/2)

    -<grad f, E G> <= -(1 - h / 2) |grad f|^2 + B / (2 h),
    E|G|^2 <= (1 + h) E|L|^2 + (1 + 1 / h) E|A|^2,

and the remaining steps of the proof, unchanged, arrive at

    (1/T) sum_t E|grad f(W_t)|^2 <= (X + h Y + E / h) / (1 - 2 h),
    Y = eta lambda (delta + 1) sigma^2,   E = (1 + eta lambda) B.

The best h, 1 / h = 2 + (4 + (2 X + Y) / E)^(1/2), gives X + 4 E + 2 (E (2 X + Y + 4 E))^(1/2).
"""

import math
from dataclasses import dataclass

from tezo_studies.analysis.estimator_variance import tezo_second_moment


def norm_moment(size: int, k: int) -> int:
    """E|u|^(2 k) for u ~ N(0, I_size): size (size + 2) ... (size + 2 k - 2)."""
    return math.prod(size + 2 * i for i in range(k))


def delta_rho(m: int, n: int, r: int) -> float:
    """(r / 4) E(sum_s a_s)^3 with a_s = tau_s^2 |u_s|^2 |v_s|^2, whose summands are independent."""
    first, second, third = (norm_moment(1, k) * norm_moment(m, k) * norm_moment(n, k) for k in (1, 2, 3))
    pairs, triples = 3 * r * (r - 1), r * (r - 1) * (r - 2)
    return r / 4 * (r * third + pairs * second * first + triples * first**3)


def printed_delta_rho(m: int, n: int, r: int) -> float:
    """delta_rho as Theorem 2 prints it, with the bounds (m + 3)^3 on E|u|^6 and 2 m^2 on E|u|^4."""
    cells = (m * n) ** 3
    return (15 * r**2 * (m + 3) ** 3 * (n + 3) ** 3 + 36 * r**3 * cells + r**4 * cells) / 4


@dataclass(frozen=True, kw_only=True)
class Constants:
    """The constants of the theorem for an objective of an M x N matrix.

    Attributes:
        rows: M.
        columns: N.
        rank: r.
        lipschitz: lambda.
        variance: sigma^2, of the gradient of a step, summed over entries.
        gap: D_0 = f(W_0) - min f.
        rho: perturbation rate of the unscaled Z, whose entries have variance r.
    """

    rows: int
    columns: int
    rank: int
    lipschitz: float
    variance: float
    gap: float
    rho: float

    @property
    def delta(self) -> float:
        """Relative variance of the estimate, Theorem 1."""
        return tezo_second_moment(self.rows, self.columns, self.rank) - 1

    @property
    def delta_rho(self) -> float:
        """delta_rho with the moments of Gaussian vectors."""
        return delta_rho(self.rows, self.columns, self.rank)

    @property
    def printed_delta_rho(self) -> float:
        """delta_rho as printed."""
        return printed_delta_rho(self.rows, self.columns, self.rank)

    def rate(self, steps: int) -> float:
        """The theorem's learning rate for `steps` steps, with the factor 1 in its O(), and at most its limit."""
        noise = self.remainder(self.printed_delta_rho) + self.delta * self.variance
        limit = 1 / (self.lipschitz * (self.delta + 1))
        return min(limit, math.sqrt(self.gap / (self.lipschitz * steps * noise)))

    def remainder(self, delta_rho: float) -> float:
        """B = rho^2 lambda^2 delta_rho, the bound on E|A|^2."""
        return (self.rho * self.lipschitz) ** 2 * delta_rho

    def noise(self) -> float:
        """(delta + 1) sigma^2."""
        return (self.delta + 1) * self.variance

    def printed_bound(self, steps: int, lr: float) -> float:
        """The paper's bound X with its own delta_rho; the mean estimate at rho > 0 is taken to be the gradient."""
        return self._leading(steps, lr, self.printed_delta_rho)

    def bound(self, steps: int, lr: float) -> float:
        """The bound that the mended proof gives; `lr` must be at most 1 / (lambda (delta + 1))."""
        x = self._leading(steps, lr, self.delta_rho)
        y = lr * self.lipschitz * self.noise()
        e = (1 + lr * self.lipschitz) * self.remainder(self.delta_rho)
        return x + 4 * e + 2 * math.sqrt(e * (2 * x + y + 4 * e))

    def _leading(self, steps: int, lr: float, delta_rho: float) -> float:
        return 2 * self.gap / (lr * steps) + lr * self.lipschitz * (self.remainder(delta_rho) + self.noise())
