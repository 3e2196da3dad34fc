"""The formulas of Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (ICML 2023).

Plain numbers in, plain numbers out. alpha: expected acceptance of one drafted token; c: time of one draft pass over
time of one target pass; K: drafted tokens (gamma in the paper). All but `alpha_of` also take one alpha per position.
"""

from collections.abc import Sequence

from torch import Tensor

Alphas = float | Sequence[float]


def alpha_of(p_V: Tensor, q_V: Tensor) -> float:
    """beta = sum_x min(p, q), one prefix's acceptance (Theorem 3.5); its mean over prefixes is alpha."""
    return float((p_V.minimum(q_V)).sum())


def survival(alphas: Alphas, num_drafted: int) -> list[float]:
    """Probability that the first k drafted tokens are all accepted, for k = 1..K."""
    reached, result = 1.0, []
    for k in range(num_drafted):
        reached *= alphas if isinstance(alphas, (int, float)) else (alphas[k] if k < len(alphas) else 0.0)
        result.append(reached)
    return result


def expected_tokens(alphas: Alphas, num_drafted: int) -> float:
    """Tokens per target pass, the target's own included: (1 - alpha^(K+1)) / (1 - alpha), equation (1)."""
    return 1.0 + sum(survival(alphas, num_drafted))


def walltime_factor(alphas: Alphas, num_drafted: int, c: float, verify: float = 1.0) -> float:
    """Expected speed-up over plain decoding (Theorem 3.8): tokens / (K c + v).

    verify: time of a pass over K + 1 rows over that of one row. The paper assumes 1; on a CPU it is not.
    """
    return expected_tokens(alphas, num_drafted) / (num_drafted * c + verify)


def operations_factor(alphas: Alphas, num_drafted: int, c_ops: float) -> float:
    """Growth of the arithmetic operations (Theorem 3.11): (K c_ops + K + 1) / tokens."""
    return (num_drafted * c_ops + num_drafted + 1) / expected_tokens(alphas, num_drafted)


def best_num_drafted(alphas: Alphas, c: float, most: int = 63, verify: Sequence[float] | None = None) -> int:
    """The K in 0..most with the largest `walltime_factor`; 0 where drafting does not pay.

    verify: cost of a pass over 1, 2, ... rows over that of one row; K is limited to what it covers.
    """
    most = most if verify is None else min(most, len(verify) - 1)
    if most < 0:
        return 0
    return max(range(most + 1), key=lambda k: walltime_factor(alphas, k, c, 1.0 if verify is None else verify[k]))
