"""What each attention method allocates on a rank, beyond what it is given: one small function a method and direction.

Given are q, k and v (forward), or these with out, lse and dout (backward), of the rank's own tokens and heads. The
result is the most that lives besides, in bytes, what is returned included. Letters as in the methods' papers; w = a / e
is what accumulating in float32 multiplies bytes by: 2 for bfloat16.

Under a causal mask, with zigzag layouts, a rank's own cell of the grid is a whole causal square, and every other one is
half: all queries against half of the keys, or half of the queries against all keys. All is as rank 0 has it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Sizes:
    """Bytes of what a call of a method is about, on one rank.

    Args:
        q: of queries [B, T, H, D], and so of out, dout and dq.
        k: of keys [B, T, K, D], and so of v, dk and dv.
        lse: of [B, T, H] in the accumulation dtype.
        w: bytes of an accumulated element, a, over those of an element, e.
        groups: G = H / K.
    """

    q: float
    k: float
    lse: float
    w: float
    groups: float

    def times(self, n: float) -> Sizes:
        """Of n times as many tokens."""
        return replace(self, q=n * self.q, k=n * self.k, lse=n * self.lse)

    @property
    def travelling(self) -> float:
        """q, out, dout and lse: what goes round when queries do in backward."""
        return 3 * self.q + self.lse


def kernel_forward(x: Sizes, queries: float = 1) -> float:
    """out and lse, of a share of the queries."""
    return queries * (x.q + x.lse)


def kernel_backward(x: Sizes, queries: float = 1, keys: float = 1) -> float:
    """dq, dk and dv of shares of queries and keys, and FlashAttention-2's work: see `SimulatedFlash`.

    dq in float32, two numbers for each row, and where heads share keys, dk and dv of every query head.
    """
    shared = 2 * x.groups * x.k if x.groups > 1 else 0
    return queries * (x.q + x.w * x.q + 2 * x.lse) + keys * (2 * x.k + shared)


def local_forward(x: Sizes) -> float:
    """One cell."""
    return kernel_forward(x)


def local_backward(x: Sizes) -> float:
    """One cell; gradients stay as the kernel gave them."""
    return kernel_backward(x)


def rotate_keys_forward(x: Sizes, ranks: int, onward: float = 0.5) -> float:
    """R ranks pass keys on. Results are merged in float32: the sum, and half of the queries' partial out, and its copy.

    Args:
        onward: the share of the keys in hand that goes on, copied; all of them are at the first step alone, and leave
            as they came afterwards.
    """
    if ranks == 1:
        return kernel_forward(x)
    passing = 2 * x.k * (1 if ranks == 2 else 2 + onward % 1)
    merged, part = x.w * x.q + x.lse, kernel_forward(x, 0.5)
    adding = passing + merged + part + x.w * x.q / 2 + x.lse * 2  # four rows of weights, of half of the queries
    widening = passing + merged + part + x.q
    first = 2 * x.k * (1 + onward) + kernel_forward(x)
    return max(first, adding, widening)


def rotate_keys_backward(x: Sizes, ranks: int, onward: float = 0.5) -> float:
    """R ranks pass keys on, and behind them the sums of dk and dv, in float32. dq is summed here.

    At the third step all is there: k and v in hand, coming and leaving; dk and dv of this rank's own, the sums that
    arrive and those that are sent; dq, and a kernel with half of the queries.
    """
    own = 2 * x.w * x.k
    if ranks == 1:
        return max(kernel_backward(x), (1 + x.w) * x.q + 2 * x.k + own)
    first = 2 * x.k * (1 + onward) + kernel_backward(x)
    passing = 2 * x.k * (1 if ranks == 2 else 2 + onward % 1)
    second = passing + own + x.q + kernel_backward(x, queries=0.5)
    if ranks == 2:
        return max(first, second)
    passing = 2 * x.k * (1 if ranks == 3 else 2 + onward % 1)
    return max(first, second, passing + 3 * own + x.w * x.q + kernel_backward(x, queries=0.5))


def rotate_queries_forward(x: Sizes, ranks: int) -> float:
    """TokenRing's: R ranks pass queries on, and partial results come straight back.

    The first to come back is merged at the third step, with queries in hand and coming: there are this rank's own
    partial result and its float32 copy, the third step's, and the one that came (half of the tokens) with its copy.
    """
    if ranks == 1:
        return kernel_forward(x)
    passing = x.q * min(ranks - 2, 2)
    return passing + 2.5 * kernel_forward(x) + 1.5 * x.w * x.q + x.lse


def rotate_queries_backward(x: Sizes, ranks: int, direct: bool) -> float:
    """R ranks pass q, out, dout and lse on; dk and dv are summed here, in float32.

    Args:
        direct: shares of dq go straight to their owner, who sees half of each (TokenRing); otherwise the sum of dq
            follows its queries, and comes, is here and leaves.
    """
    own, sums = x.w * x.q, 2 * x.w * x.k
    if ranks == 1:
        return max(kernel_backward(x), own + x.q + 2 * x.k, own + sums + x.k)
    cell = kernel_backward(x, keys=0.5)
    first = 1.5 * x.travelling + kernel_backward(x)
    passing = x.travelling * (1 if ranks == 2 else 2.5)
    widening = x.q + x.k + sums + x.k  # the second step's shares, while dv of the first becomes float32
    second = passing + own + max(2 * x.k + cell, widening)
    if ranks == 2:
        return max(first, second)
    passing = x.travelling * (1 if ranks == 3 else 2.5)
    returning = own + own / 2 if direct else 2 * own
    return max(first, second, passing + own + sums + returning + cell)


def ring_forward(x: Sizes, ranks: int) -> float:
    """P ranks pass keys on."""
    return rotate_keys_forward(x, ranks)


def ring_backward(x: Sizes, ranks: int, keys: bool) -> float:
    """Keys go round, or queries."""
    return rotate_keys_backward(x, ranks) if keys else rotate_queries_backward(x, ranks, direct=False)


def token_ring_forward(x: Sizes, ranks: int) -> float:
    """P ranks pass queries on."""
    return rotate_queries_forward(x, ranks)


def token_ring_backward(x: Sizes, ranks: int) -> float:
    """P ranks pass queries on, and send shares of dq straight home."""
    return rotate_queries_backward(x, ranks, direct=True)


def wallfacer_forward(x: Sizes, ranks: int, team: int) -> float:
    """q, k and v of the team, a ring of R = P / C^2 ranks over them, and then the members' parts of out and lse."""
    if team == 1:
        return ring_forward(x, ranks)
    all_, gathered = x.times(team), team * (x.q + 2 * x.k)
    ring = rotate_keys_forward(all_, ranks // team**2, onward=1)
    merging = 2 * kernel_forward(all_) + 2 * x.w * x.q + 5 * x.lse
    return gathered + max(ring, merging)


def wallfacer_backward(x: Sizes, ranks: int, team: int, keys: bool) -> float:
    """q, k, v, out, dout and lse of the team, a ring over them, and then each member's parts of the gradients.

    These are summed in float32: what is sent, what came, and the sums for dk and dv.
    """
    if team == 1:
        return ring_backward(x, ranks, keys)
    all_, ring = x.times(team), ranks // team**2
    gathered = all_.travelling + 2 * all_.k
    inner = rotate_keys_backward(all_, ring, onward=1) if keys else rotate_queries_backward(all_, ring, direct=False)
    home = 2 * x.w * (all_.q + 2 * all_.k) + 2 * x.w * x.k
    return max(gathered + inner, home)


def all_gather_forward(x: Sizes, ranks: int) -> float:
    """k and v of all P ranks; own queries against a causal square, then half of them against all other keys."""
    if ranks == 1:
        return kernel_forward(x)
    merged, part = x.w * x.q + x.lse, kernel_forward(x, 0.5)
    return 2 * ranks * x.k + merged + part + max(x.q, x.w * x.q / 2 + 2 * x.lse)


def all_gather_backward(x: Sizes, ranks: int) -> float:
    """k and v of all P ranks, and dk and dv of as many in float32, which are then sent to their owners and summed."""
    if ranks == 1:
        return kernel_backward(x)
    every = 2 * ranks * x.k
    others = kernel_backward(x, queries=0.5, keys=ranks - 1)
    scattering = x.w * x.q + x.w * every + 2 * x.w * x.k
    return x.w * every + max(every + x.q + others, scattering)


def keys_go_round(x: Sizes) -> bool:
    """Whether a ring's backward sends fewer bytes with keys than with queries."""
    queries = 3 * x.q + x.lse + x.w * x.q
    return queries >= 2 * x.k * (1 + x.w)


def upipe_forward(x: Sizes, inner: float) -> float:
    """A stage: q, k and v have arrived; then `inner`."""
    return x.q + 2 * x.k + inner


def upipe_backward(x: Sizes, inner: float, ranks: int, turns: int, several: bool, wide: bool) -> float:
    """A stage: q, out, dout, k and v have arrived, then `inner`; and there are sums of dk and dv of the round so far.

    Args:
        ranks: U. With one, out and dout are where they were; where only `several` stages make up the whole, the kernel
            has them copied, as heads of a stage do not lie together.
        turns: stages of a round. Sums are as the first stage gave them, and in float32 from the second on.
        wide: `inner` gives dk and dv in float32.
    """
    outs = 2 * x.q if ranks > 1 or several else 0
    sums = 0 if turns == 1 else 2 * x.k * (x.w if wide or turns > 2 else 1)
    return x.q + outs + 2 * x.k + sums + inner
