"""Defects of tiles that are computed transposed, each injected by a patch: (program, words of the report, defect).

The programs are in `test_swap_protocol.py`. Most defects replace source text of one function. HARMLESS holds changes
that do no harm, with the reason.
"""

from __future__ import annotations

import functools
import types

from overlap.collectives.gather import joined_kernel, lhs_kernel
from overlap.collectives.gather.joined_schedule import JoinedSchedule
from overlap.kernels import epilogue, partial_sums, product_kernel
from overlap.kernels.hopper import mainloop as hopper
from overlap.kernels.tma import finish, store
from overlap.single_gpu import product
from tests.protocol.scatter_defects import NOTHING
from tests.protocol.test_blackwell_found import slip

accumulate = functools.partial(slip, hopper, "_accumulate")
compute = functools.partial(slip, hopper, "_compute")
plan = functools.partial(slip, hopper, "_plan")
part_index = functools.partial(slip, hopper, "_wg_tile_index")
stores = functools.partial(slip, store, "store", used_in=finish)
half = functools.partial(slip, hopper, "warpgroup_tile")
together = functools.partial(slip, partial_sums, "finish_together", used_in=finish)
of_rows = functools.partial(slip, lhs_kernel._Body, "_epilogue_at")
of_joined = functools.partial(slip, joined_kernel._Body, "_epilogue_at")

OPERANDS = "(rhs_wg_smem, lhs_wg_smem) if config.swap_operands else (lhs_wg_smem, rhs_wg_smem)"
BY_COLUMNS = "config.tile_m, config.tile_n // COMPUTE_WARPGROUPS"
TURNS = "not layouts.transpose_rhs, not layouts.transpose_lhs"
TRANSPOSED = "if buffers.plan.wg_tile.transposed:"
ROWS = "min(block_rows, wg_m - above)"
PLACE = "register_views.at[box, pl.ds(above, rows)]"
SHAPE = "(wg_n, wg_m) if config.swap_operands"
HAND_OVER = "hand_over(partial.at(me, pl.ds(first_row, rows), pl.ds(first_column, columns)))"
TELL = "semaphore_signal(partial.flags.at[me, piece.rank, piece.wg_tile_index])"
TILES = "staging.SMALL_TILE_ROWS if config.swap_operands else tile_rows"


def replace(holder, name, value):
    return lambda patch: patch.setattr(holder, name, value)


def _untold(module):
    """Returns the module with epilogues that treat the values as not transposed."""

    def epilogue_of(*args, **kwargs):
        return module.epilogue(*args, **kwargs | {"transposed": False})

    return types.SimpleNamespace(**{**vars(module), "epilogue": epilogue_of})


# jax's exceptions about shapes count as a report too: no kernel can be made with such a defect.
INJECTED = {
    # The operands of the tensor cores.
    "operands not exchanged": (
        "one",
        "shape|dimension|Incompatible",
        accumulate({OPERANDS: "lhs_wg_smem, rhs_wg_smem"}),
    ),
    "square tile, not exchanged": (
        "square",
        "not equal|shape",
        accumulate({OPERANDS: "lhs_wg_smem, rhs_wg_smem", TURNS: "layouts.transpose_lhs, layouts.transpose_rhs"}),
    ),
    "left as it lies": ("square", "not equal", accumulate({TURNS: "layouts.transpose_rhs, not layouts.transpose_lhs"})),
    "right as it lies": (
        "square",
        "not equal",
        accumulate({TURNS: "not layouts.transpose_rhs, layouts.transpose_lhs"}),
    ),
    "accumulator upright": (
        "one",
        "shape|dimension|Incompatible",
        accumulate({SHAPE: "(wg_m, wg_n) if config.swap_operands"}),
    ),
    # The part of a tile that each warpgroup computes.
    "both the left half": (
        "one",
        "not equal|race",
        accumulate({"rhs_mma.at[stage], wg_n_index": "rhs_mma.at[stage], 0 * wg_n_index"}),
    ),
    "halves exchanged": (
        "one",
        "not equal",
        accumulate({"rhs_mma.at[stage], wg_n_index": "rhs_mma.at[stage], 1 - wg_n_index"}),
    ),
    "corner left": ("one", "not equal|race", compute({"wg_n_index * wg_n": "0"})),
    "corner by rows": ("one", "not equal|race", compute({"wg_n_index * wg_n": "wg_n_index * wg_m"})),
    "corner below": ("one", "out of bounds", part_index({"(warpgroup, 0, warpgroup)": "(warpgroup, warpgroup, 0)"})),
    "halves across rows": (
        "tall",
        "out of bounds",
        half(
            {
                f"return {BY_COLUMNS}\n    if": "return config.tile_m // COMPUTE_WARPGROUPS, config.tile_n\n    if",
            }
        ),
    ),
    "one warpgroup alone": ("one", "deadlock|not equal", plan({"wg_tiles = all_wg_tiles if": "wg_tiles = 1 if"})),
    "slots of one": (
        "one",
        "race|TMA load|missed|deadlock",
        plan({"consumed=_consumed(config, wg_tiles + types.forwards)": "consumed=_consumed(config, 1)"}),
    ),
    # What is stored where.
    "no transpose": ("one", "shape|dimension|Incompatible", stores({TRANSPOSED: "if False:"})),
    "square block, no transpose": ("square", "not equal", stores({TRANSPOSED: "if False:"})),
    "rows of the first block": ("blocks", "not equal", compute({"slice(row, row + rows)": "slice(0, rows)"})),
    "stored in the first block": (
        "blocks",
        "nobody has written",
        stores({PLACE: "register_views.at[box, pl.ds(0, rows)]"}),
    ),
    "no last block": (
        "blocks",
        "nobody has written",
        stores({"range(0, wg_m, block_rows)": "range(0, wg_m // block_rows * block_rows, block_rows)"}),
    ),
    "last block too long": ("blocks", "bounds|shape|slice|divi|range", stores({ROWS: "block_rows"})),
    "columns of the first piece": (
        "pieces",
        "not equal",
        slip(finish, "_store_all", {"first + columns.start, columns.stop": "columns.start, columns.stop"}),
    ),
    "rows and columns exchanged": (
        "one",
        "shape|dimension|bounds|Incompatible|slice",
        compute({"values[columns, across] if": "values[across, columns] if"}),
    ),
    "as many rows as a tile": (
        "few",
        "nobody has written",
        plan({"rows = loaded if": "rows = wg_m if"}),
    ),
    "fewer rows than are loaded": (
        "one",
        "not equal",
        plan({"rows = loaded if": "rows = loaded - 8 if"}),
    ),
    "store before it is read": ("one", "buffers.out", replace(store, "wait_stores_read", NOTHING)),
    "a store less": ("one", "buffers.out", stores({"read(0)": "read(1)"})),
    "leave too early": ("one", "freed too early", replace(hopper, "wait_stores_read", NOTHING)),
    "addend as it lies": (
        "square addend",
        "not equal",
        stores({"given = block_smem[...]": "given = register_views.at[box, pl.ds(above, rows)][...]"}),
    ),
    "addend of the first block": (
        "blocks, addend",
        "not equal",
        stores({"given = block_smem[...]": "given = register_views.at[box, pl.ds(0, rows)].transpose((1, 0))[...]"}),
    ),
    # The sums of CTAs that share a tile.
    "sums upright": (
        "cut",
        "bounds|shape|dimension|Incompatible",
        slip(partial_sums.PartialSums, "at", {"columns, self.transposed": "columns, False"}),
    ),
    "room for upright sums": (
        "cut",
        "bounds|shape|dimension|Incompatible",
        slip(partial_sums, "partial_sums_type", {"config.swap_operands": "False"}, used_in=product_kernel),
    ),
    "sums of the first block": (
        "cut",
        "not equal",
        together({"pl.ds(first_row + row, rows)": "pl.ds(first_row, rows)"}),
    ),
    "sums of the first box": ("cut", "not equal", together({"index * piece.box_width": "0 * index"})),
    "share of the first piece": ("cut", "race|not equal|written", together({"share(piece.index,": "share(0,"})),
    "sums before the flag": (
        "cut, in turn",
        "race|uninitialized|written",
        replace(partial_sums, "semaphore_wait", NOTHING),
    ),
    "flag before the sums": (
        "cut, in turn",
        "race",
        together({HAND_OVER: "pass", TELL: f"{TELL}; {HAND_OVER}"}),
    ),
    # Bias and scales.
    "bias along rows": (
        "square bias",
        "not equal",
        slip(epilogue, "epilogue", {"(1, 0) if transposed else (0, 1)": "(1, 1)"}),
    ),
    "scales along columns": (
        "square scales",
        "not equal",
        slip(epilogue, "epilogue", {"(1, 0) if transposed else (0, 1)": "(0, 1)"}),
    ),
    "scales of the first block": (
        "blocks, scales",
        "not equal",
        stores({"pl.ds(first_row + above, rows), columns, addend": "pl.ds(first_row, rows), columns, addend"}),
    ),
    "not told": (
        "square scales",
        "not equal",
        lambda patch: patch.setattr(product, "epilogue", _untold(product.epilogue)),
    ),
    "row scales of a gather": (
        "pull, scales",
        "shape|not equal|dimension",
        of_rows({"1 if config.swap_operands else 0": "0"}),
    ),
    "row scales of joined rows": (
        "joined, scales",
        "shape|not equal|dimension",
        of_joined({"1 if swapped else 0": "0"}),
    ),
    "scales of the rows above": (
        "joined, scales",
        "not equal",
        replace(JoinedSchedule, "read_rows", property(lambda _: 128)),
    ),
}
HARMLESS = {
    # The height of the blocks in which rows are stored only affects registers.
    "all rows at once": ("blocks", plan({"wg_n, WGMMA_M,": "wg_n, loaded,"})),
    "blocks of 32 rows": ("blocks, scales", plan({"wg_n, WGMMA_M,": "wg_n, 32,"})),
    # Tiles with more rows work where they fit. Small tiles work for any number of rows.
    "tiles of 64 rows, which fit": ("square", plan({TILES: "tile_rows"})),
}
