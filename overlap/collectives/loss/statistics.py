"""What the loss of a linear layer needs of its logits, on one device, with a backward pass that stores few of them.

    z = cap(x @ w + bias)           [T, n], never stored whole
    lse, at_label                   log Σ exp z, and z at the label; zero for a label that is no column of this device

The backward pass goes through the columns of w chunk by chunk. It computes the logits of a chunk again, and from them
dz, the cotangent of x @ w, in the dtype of x:

    dz = (p · exp(z − lse) + q · [the column is the label]) · cap′        p, q: cotangents of lse and at_label
    dx += dz @ w[:, chunk]ᵀ in f32,   dw[:, chunk] = xᵀ @ dz

So it takes memory for one dz, [T, chunk], and for dx in f32. Kernels compute the statistics, dz and dx, and XLA dw. The
same by XLA, with logits of one chunk in f32, is the reference for other derivatives, and is what runs where no kernel
does.

Or, for more memory, the forward pass keeps which share exp z has of the sum of its block of 64 columns, in the dtype of
x. With the sums of the blocks the backward pass has exp(z − lse) without another product. A share is rounded, which is
as good as a rounded dz but where the label's share is near 1: there z is known, `at_label`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import sequential_vmap
from jax.interpreters import ad

from overlap.choice.session import explaining
from overlap.frame.explain import recorded
from overlap.frame.linear import tangents_of
from overlap.frame.operands import accumulator
from overlap.frame.rules import with_rule
from overlap.frame.signatures import Leaf
from overlap.kernels import launch
from overlap.kernels.limits import EPILOGUE_COLUMNS
from overlap.kernels.varying import alike, axes_of, varying
from overlap.primitives.integers import ceil_div, largest_divisor
from overlap.single_gpu.logits_product import FAR, NAME, Logits, Product, Rows, Vocabulary, in_whole_rows

# Into so many parts at most the rows of dz are cut where it takes the place of shares.
_PARTS = 8
# The arrays of a call: "x", [T, H]; "w", [H, n] or [n, H]; "labels", int32 [T]; "place", int32 [2]: 0, and how many
# columns belong to the vocabulary; perhaps "bias", [n]. In the backward pass also "lse", "of_sum" and "of_label", and
# "at_label", "shares" and "of_blocks" if they were kept.
type Given = Mapping[str, Leaf]


@dataclasses.dataclass(frozen=True)
class Static:
    """What is static in a call.

    Attributes:
      vocabulary: the layout of `w`, the soft cap, and whether columns are left out.
      chunk: the columns of a chunk; 0: the logits are stored whole, and jax derives the backward pass.
      products: the kernels for `Product.statistics`, `cotangent` and `summed`; None: XLA runs.
      must_fuse: whether the caller asked for the kernels. XLA may then not run in their place.
      keeps: whether shares are kept for the backward pass. There is no soft cap then: where it saturates, its
        derivative needs z better than a rounded share tells.
    """

    vocabulary: Vocabulary
    chunk: int
    products: tuple[Product, ...] | None
    must_fuse: bool = False
    keeps: bool = False

    @property
    def of_sum(self) -> Product | None:
        """The kernel that adds to dx; None: XLA does, whose own product of all columns at once is as fast or faster."""
        return None if self.products is None or self.keeps else self.products[2]


def statistics(static: Static, given: Given) -> tuple[jax.Array, jax.Array]:
    """Returns `lse` and `at_label`, each [T], in f32 (f64 for operands of f64), with derivatives of any order."""
    if not static.chunk:
        return _by_xla(static, given)
    return with_rule(functools.partial(_run, _forward, static), functools.partial(_tangent, static), given)


def _run[T](function: Callable[[Static, Given], T], static: Static, given: Given) -> T:
    """Returns `function(static, given)`, as one operation of jax if it has kernels; by XLA where only types count.

    Under `jax.vmap` kernels run for one element after the other.
    """
    by_xla = functools.partial(function, dataclasses.replace(static, products=None))
    if static.products is None or explaining.value is not None:
        return by_xla(given)
    run = launch.sealed(functools.partial(function, static), NAME, None if static.must_fuse else by_xla)
    return sequential_vmap(run)(given)


def _forward(static: Static, given: Given) -> tuple[jax.Array, jax.Array]:
    if static.products is None:
        return _by_xla(static, given)
    logits = Logits(given["x"], given["w"], given["place"], Rows(given["labels"]), given.get("bias"))
    lse, at_label = static.products[0].statistics(logits)
    return lse, at_label


def _keeping(static: Static, given: Given) -> tuple[jax.Array, ...]:
    """The statistics, shares and sums of blocks."""
    if static.products is not None:
        logits = Logits(given["x"], given["w"], given["place"], Rows(given["labels"]), given.get("bias"))
        return static.products[0].statistics(logits, keeps=True)
    given = alike(given)
    z, numbers, _ = _logits(static, given, 0, static.vocabulary.size(given["w"]))
    at_label = jnp.where(numbers == given["labels"][:, None], z, 0).sum(axis=1)
    tokens, columns = z.shape
    blocks = jnp.pad(z, ((0, 0), (0, -columns % EPILOGUE_COLUMNS)), constant_values=-jnp.inf)
    blocks = blocks.reshape(tokens, -1, EPILOGUE_COLUMNS)
    of_blocks = _log_sum(blocks, 2)
    shares = jax.nn.softmax(blocks, axis=2, where=blocks > -jnp.inf).reshape(tokens, -1)
    shares = shares[:, : in_whole_rows(columns, given["x"].dtype)].astype(given["x"].dtype)
    return _log_sum(of_blocks, 1), at_label, shares, of_blocks.T


def _log_sum(z: jax.Array, axis: int) -> jax.Array:
    """Returns log Σ exp z. Of −∞ alone that is −∞, without a gradient: jax's own would be NaN."""
    found = jax.nn.logsumexp(jnp.maximum(z, FAR), axis=axis)
    return jnp.where(found > FAR / 2, found, -jnp.inf)


def _differentiated_by_xla[T](function: Callable[[Static, Given], T], static: Static, given: Given) -> T:
    """Returns `function(static, given)`; derivatives are those of what XLA runs in its place."""
    by_xla = functools.partial(function, dataclasses.replace(static, products=None))

    def rule(primals: tuple[Given], tangents: tuple[Given]) -> tuple[Leaf, Leaf]:
        (given,) = primals
        moved = {name: x for name, x in tangents[0].items() if not isinstance(x, ad.Zero)}
        with recorded():
            return jax.jvp(lambda moved: by_xla({**given, **moved}), ({k: given[k] for k in moved},), (moved,))

    return with_rule(functools.partial(_run, function, static), rule, given)


def _tangent(static: Static, primals: tuple[Given], tangents: tuple[Given]) -> tuple[Leaf, Leaf]:
    (given,) = primals
    if static.keeps:
        *outs, shares, of_blocks = _differentiated_by_xla(_keeping, static, given)
        outs = tuple(outs)
        saved = {"at_label": outs[1], "shares": shares, "of_blocks": of_blocks}
    else:
        outs = statistics(static, given)
        saved = {}
    # With biases of −∞ a device may have no column that counts. Then −∞ − (−∞) would be NaN.
    saved["lse"] = jnp.maximum(outs[0], FAR)
    tangent = tangents_of(
        outs,
        primals,
        tangents,
        by_xla=lambda operands: _by_xla(static, *operands),
        backward=functools.partial(_cotangents, static),
        saved=saved,
    )
    return outs, tangent


def _cotangents(
    static: Static, operands: tuple[Given], saved: Given, cotangents: Sequence[Leaf], wanted: tuple[Given]
) -> tuple[dict[str, Leaf]]:
    """The backward pass, as `tangents_of` calls it."""
    (given,) = operands
    of_sum, of_label = map(ad.instantiate_zeros, cotangents)
    names = tuple(name for name, dtype in wanted[0].items() if dtype is not None)
    more = {**given, **saved, "of_sum": of_sum, "of_label": of_label}
    found = _differentiated_by_xla(functools.partial(_backward, names), static, more)
    return ({name: found.get(name) for name in given},)


def _backward(names: tuple[str, ...], static: Static, given: Given) -> dict[str, jax.Array]:
    """Returns the cotangents of the arrays with these names, that of x with more bits than x."""
    given = alike(given)
    x, w = given["x"], given["w"]
    wide = accumulator(x.dtype)
    transposed = static.vocabulary.transposed
    # A kernel's result is never differentiated, so what it is stored to may hold anything before.
    empty = jnp.zeros if static.products is None else lax.empty
    sums: dict[str, jax.Array] = {}
    if "x" in names:
        sums["x"] = jnp.zeros(x.shape, wide)
    if "w" in names:
        sums["w"] = empty(w.shape, w.dtype)
    if "bias" in names:
        sums["bias"] = empty(given["bias"].shape, wide)
    sums = {name: varying(value, axes_of(x)) for name, value in sums.items()}

    def add(first: Leaf, size: int, sums: dict[str, jax.Array]) -> dict[str, jax.Array]:
        padded = size if static.of_sum is None else in_whole_rows(size, x.dtype)
        dz = _dz(static, given, first, padded)
        found = dict(sums)
        if "x" in names:
            found["x"] = _added(static, given, sums["x"], dz, first)
        dz = dz[:, :size]
        if "w" in names:
            # Summed in f32, and rounded once.
            of_chunk = _dot(dz, x, 0, 0, w.dtype) if transposed else _dot(x, dz, 0, 0, w.dtype)
            found["w"] = lax.dynamic_update_slice_in_dim(sums["w"], of_chunk, first, 0 if transposed else 1)
        if "bias" in names:
            found["bias"] = lax.dynamic_update_slice_in_dim(sums["bias"], dz.sum(axis=0, dtype=wide), first, 0)
        return found

    return _over_chunks(static, w, add, sums)


def _over_chunks[T](static: Static, w: jax.Array, add: Callable[[Leaf, int, T], T], first: T) -> T:
    """Calls `add(first column, columns, sums)` for each chunk; the last one may be smaller."""
    chunks, rest = divmod(static.vocabulary.size(w), static.chunk)
    sums = first
    if chunks == 1:
        sums = add(0, static.chunk, sums)
    elif chunks:
        sums = lax.fori_loop(0, chunks, lambda i, sums: add(i * static.chunk, static.chunk, sums), sums)
    return add(chunks * static.chunk, rest, sums) if rest else sums


def _place(given: Given, first: Leaf) -> jax.Array:
    """Where a chunk begins, and how many columns count, as kernels read it."""
    return jnp.stack([varying(jnp.asarray(first, jnp.int32), axes_of(given["x"])), given["place"][1]])


def _added(static: Static, given: Given, total: jax.Array, dz: jax.Array, first: Leaf) -> jax.Array:
    """Returns total + dz @ wᵀ, of the columns of w from `first` on."""
    w = given["w"]
    if static.of_sum is None:
        along = 0 if static.vocabulary.transposed else 1
        chunk = lax.dynamic_slice_in_dim(w, first, dz.shape[1], along)
        return total + _dot(dz, chunk, 1, along, total.dtype)
    return static.of_sum.summed(total, dz, w, _place(given, first))


def _dz(static: Static, given: Given, first: Leaf, size: int) -> jax.Array:
    """The cotangent of x @ w of the columns `first` to `first + size`, [T, size], in the dtype of x."""
    x = given["x"]
    rows = Rows(**{name: given[name] for name in ("labels", "lse", "of_sum", "of_label")})
    if static.keeps:
        return _dz_of_shares(given, rows, first, size)
    if static.products is not None:
        logits = Logits(x, given["w"], _place(given, first), rows, given.get("bias"))
        return static.products[1].cotangent(logits, size)
    z, numbers, slope = _logits(static, given, first, size)
    of_label = jnp.where(numbers == rows.labels[:, None], rows.of_label[:, None], 0)
    dz = jnp.exp(z - rows.lse[:, None]) * rows.of_sum[:, None] + of_label
    return (dz if slope is None else dz * slope).astype(x.dtype)


def _dz_of_shares(given: Given, rows: Rows, first: Leaf, size: int) -> jax.Array:
    """`_dz` of what the forward pass has kept.

    It goes part by part of the rows, so that XLA writes dz to where the shares are.
    """
    shares = lax.dynamic_slice_in_dim(given["shares"], first, size, 1)
    count = ceil_div(size, EPILOGUE_COLUMNS)
    of_blocks = lax.dynamic_slice_in_dim(given["of_blocks"], first // EPILOGUE_COLUMNS, count, 0).T
    tokens = shares.shape[0]
    of_part = tokens // largest_divisor(tokens, _PARTS)

    def write(part: jax.Array, into: jax.Array) -> jax.Array:
        def own[T](value: T) -> T:
            return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, part * of_part, of_part, 0), value)

        label, lse, of_sum, of_label, at_label = (
            x[:, None] for x in own((rows.labels, rows.lse, rows.of_sum, rows.of_label, given["at_label"]))
        )

        factors = jnp.exp(own(of_blocks) - lse)
        factors = lax.broadcast_in_dim(factors, (*factors.shape, EPILOGUE_COLUMNS), (0, 1))
        p = own(into) * factors.reshape(of_part, -1)[:, :size]
        is_label = lax.broadcasted_iota(jnp.int32, p.shape, 1) + first == label
        dz = jnp.where(is_label, jnp.exp(at_label - lse), p) * of_sum + jnp.where(is_label, of_label, 0)
        return lax.dynamic_update_slice_in_dim(into, dz.astype(into.dtype), part * of_part, 0)

    return lax.fori_loop(0, tokens // of_part, write, shares)


def _by_xla(static: Static, given: Given) -> tuple[jax.Array, jax.Array]:
    """The statistics by XLA, from the logits of one chunk after the other, or from all of them."""
    given = alike(given)
    x, w = given["x"], given["w"]
    tokens = x.shape[0]
    wide = accumulator(x.dtype)

    def add(first: Leaf, size: int, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        lse, at_label = sums
        z, numbers, _ = _logits(static, given, first, size)
        at_label += jnp.where(numbers == given["labels"][:, None], z, 0).sum(axis=1)
        return jnp.logaddexp(lse, _log_sum(z, 1)), at_label

    if not static.chunk:
        z, numbers, _ = _logits(static, given, 0, static.vocabulary.size(w))
        is_label = numbers == given["labels"][:, None]
        return _log_sum(z, 1), jnp.where(is_label, z, 0).sum(axis=1)
    nothing = jnp.full(tokens, FAR, wide), jnp.zeros(tokens, wide)
    return _over_chunks(static, w, add, tuple(varying(value, axes_of(x)) for value in nothing))


def _logits(static: Static, given: Given, first: Leaf, size: int) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Returns z of some columns, the columns' numbers, and cap′ or None, as `logits_product` computes them."""
    x, w = given["x"], given["w"]
    vocabulary = static.vocabulary
    along = 0 if vocabulary.transposed else 1
    whole = size == vocabulary.size(w)
    z = _product(x, w if whole else lax.dynamic_slice_in_dim(w, first, size, along), along)
    if "bias" in given:
        bias = given["bias"].astype(z.dtype)
        z += bias if whole else lax.dynamic_slice_in_dim(bias, first, size, 0)
    z, slope = vocabulary.capped(z)
    numbers = lax.broadcasted_iota(jnp.int32, z.shape, 1) + first
    if vocabulary.is_cut:
        z = jnp.where(numbers < given["place"][1], z, FAR)
    return z, numbers, slope


def _dot(a: jax.Array, b: jax.Array, of_a: int, of_b: int, dtype: jnp.dtype) -> jax.Array:
    return lax.dot_general(a, b, (((of_a,), (of_b,)), ((), ())), preferred_element_type=dtype)


def _product(x: jax.Array, w: jax.Array, along: int) -> jax.Array:
    """Returns x @ w, or x @ wᵀ for `along` 0, in f32. Its backward pass multiplies 16-bit cotangents."""
    wide = accumulator(x.dtype)
    if x.dtype == wide:
        return _dot(x, w, 1, 1 - along, wide)

    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        return _dot(x, w, 1, 1 - along, wide)

    def rule(primals: tuple[Leaf, Leaf], tangents: tuple[Leaf, Leaf]) -> tuple[Leaf, Leaf]:
        out = _product(*primals, along)

        def backward(operands: Leaf, saved: None, cotangent: Leaf, wanted: Leaf) -> tuple[jax.Array, jax.Array]:
            x, w = operands
            dz = ad.instantiate_zeros(cotangent).astype(x.dtype)
            return _dot(dz, w, 1, along, wide), _dot(x, dz, 0, 0, wide) if along else _dot(dz, x, 0, 0, wide)

        return out, tangents_of(out, primals, tangents, by_xla=lambda pair: product(*pair), backward=backward)

    return with_rule(product, rule, x, w)
