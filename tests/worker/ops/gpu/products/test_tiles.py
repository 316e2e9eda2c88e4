"""How products are divided: every choice that affects bits depends only on the shape of the weight."""

import pytest
import torch

from worker.ops.linear.triton_tiles import (
    CHAIN_STEP,
    EXPERT_TILE_ROWS,
    MAX_CHAINS,
    MEASURED,
    NUM_SMS,
    DeviceKind,
    Shape,
    Tile,
    block_k_for,
    candidates,
    cdiv,
    chain_length,
    choose_expert_tile,
    choose_gated_tile,
    choose_tile,
    expert_tile_rows,
    is_single_chain,
    measured_entry,
    measured_tile,
    needs_split_k,
    product_name,
    stages_that_fit,
    tile_constants,
)

SHAPES = [(64, 70), (1024, 1024), (3072, 1024), (1024, 3072), (151_936, 1024), (2560, 9728), (48, 4096)]
ROWS = [1, 8, 16, 17, 32, 33, 64, 65, 128, 129, 512, 2048]


@pytest.mark.parametrize(("columns", "depth"), SHAPES)
def test_chains_cover_the_depth_in_steps_and_are_few(columns: int, depth: int) -> None:
    length = chain_length(columns, depth)
    chains = cdiv(depth, length)
    assert length % CHAIN_STEP == 0 and 1 <= chains <= MAX_CHAINS
    assert is_single_chain(torch.empty(columns, depth, device="meta")) is (chains == 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize(("columns", "depth"), SHAPES)
def test_tiles_cover_every_row_count_and_fit_their_rows(columns: int, depth: int, dtype: torch.dtype) -> None:
    for rows in ROWS:
        for tile in (choose_tile(rows, columns, depth, dtype), choose_gated_tile(rows, columns, depth, dtype)):
            assert tile.count(rows, columns) * tile.rows * tile.columns >= rows * columns
            assert tile.rows >= min(rows, 16) and tile.rows & (tile.rows - 1) == 0


def test_block_k_of_fp8_tokens_does_not_depend_on_the_tile() -> None:
    fp8 = torch.float8_e4m3fn
    tiles = [choose_tile(rows, 1024, 1024, fp8) for rows in ROWS]
    assert len({block_k_for(tile, fp8, fp8) for tile in tiles}) == 1


def test_tile_constants_are_even_only_if_nothing_is_masked() -> None:
    tile = choose_tile(16, 1024, 1024, torch.bfloat16)
    assert tile_constants(tile, 1024, 1024, torch.bfloat16)["EVEN"]
    assert not tile_constants(tile, 1000, 1024, torch.bfloat16)["EVEN"]
    assert not tile_constants(tile, 1024, 1000, torch.bfloat16)["EVEN"]


def test_stages_that_fit_are_at_most_the_tile_s() -> None:
    x, weight = torch.empty(1, 1024, dtype=torch.bfloat16), torch.empty(1024, 1024, dtype=torch.bfloat16)
    tile = choose_tile(16, 1024, 1024, torch.bfloat16)
    # without a GPU, nothing limits the number of stages
    assert stages_that_fit(tile, tile.columns, x, weight) == tile.stages


def test_expert_tiles_have_about_as_many_rows_as_an_expert() -> None:
    found = [expert_tile_rows(slots, 32, torch.bfloat16) for slots in (1, 512, 513, 1025, 2049, 1 << 20)]
    assert found == [16, 16, 32, 64, 128, 128]
    assert expert_tile_rows(1 << 20, 32, torch.float32) == 32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("rows", EXPERT_TILE_ROWS)
def test_expert_tiles_have_the_rows_of_their_groups(rows: int, dtype: torch.dtype) -> None:
    for columns, products in ((768, 2), (2880, 2), (2048, 1), (2880, 1), (40, 1)):
        assert choose_expert_tile(rows, columns, products, dtype).rows == rows


@pytest.mark.parametrize("capability", [80, 86, 89, 90, 100, 120])
def test_products_of_up_to_256_rows_have_a_program_for_every_multiprocessor(capability: int) -> None:
    """These products have several chains along K: qkv, o and down of models of 3B to 8B parameters."""
    device = DeviceKind("", capability)
    for columns, depth in ((5120, 3072), (3072, 8192), (2560, 4096), (2560, 9728), (6144, 4096), (4096, 14336)):
        chains = cdiv(depth, chain_length(columns, depth))
        for rows in (65, 96, 128, 192, 256):
            tile = choose_tile(rows, columns, depth, torch.bfloat16, device)
            count = tile.count(rows, columns)
            programs = count * (chains if needs_split_k(rows, count, tile) else 1)
            assert programs >= NUM_SMS or capability in (86, 89, 120)


def test_measured_tiles_hold_up_to_their_rows_and_beyond_the_last() -> None:
    few, many = Tile(16, 64, 4, 6, "split"), Tile(256, 128, 8, 4, "spilled")
    name = product_name("linear", "bfloat16", 5120, 3072)
    table = {"NVIDIA H200": {name: [measured_entry(16, few), measured_entry(512, many)]}}
    found = [measured_tile(table, "NVIDIA H200", name, rows) for rows in (1, 16, 17, 512, 8192)]
    assert found == [few, few, many, many, many]
    assert measured_tile(table, "NVIDIA L4", name, 1) is measured_tile(table, "NVIDIA H200", "linear", 1) is None


def test_candidates_have_about_the_rows_of_the_product_and_a_way_to_add_its_chains() -> None:
    for rows in ROWS:
        for chains in (1, 3):
            found = list(candidates("linear", Shape(rows, 5120, chains, True)))
            assert len(found) == len(set(found)) >= 3
            assert all(tile.rows < max(32, 2 * rows) for tile in found)
            ways = {tile.chains for tile in found}
            assert ways == {"auto"} if chains == 1 else {"together", "split"} <= ways
            assert ("spilled" in ways) == (chains > 1 and rows > 64)


def test_measured_tiles_of_the_repository_are_tiles() -> None:
    for products in MEASURED.values():
        for entries in products.values():
            rows = [entry[0] for entry in entries]
            assert rows == sorted(rows) and all(Tile(*fields).count(1, 1) == 1 for _, *fields in entries)
