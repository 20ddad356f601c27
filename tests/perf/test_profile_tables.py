"""Profile tables as files: experts, what is refused, and what is missing. Made-up times follow a formula."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from ksana.costs.profile_cost import ProfileCost
from ksana.errors import ConfigError
from ksana.perf import attention_file
from ksana.perf.expert_table import read_experts
from ksana.perf.profile_tables import missing_kinds, read_profile
from tests.costs.profiles import attention_us, write_profile
from tests.costs.test_profile_cost import shape

NUM_EXPERTS, PER_TOKEN = 16, 2
TOKENS = (1, 2, 4, 8, 16, 64, 256)


def expert_us(tokens: float, called: float) -> float:
    return 5 + 7 * called + 0.25 * tokens


def write_experts(directory: Path, *, spread: bool = True) -> Path:
    """As measured: so many tokens cannot call upon more than PER_TOKEN experts each."""
    lines = ["ep,tokens,activated_experts,time_us" if spread else "tokens,activated_experts,time_us"]
    for tokens, called in itertools.product(TOKENS, (2, 4, 8, 16)):
        if called <= PER_TOKEN * tokens:
            lines.append(f"{'1,' * spread}{tokens},{called},{expert_us(tokens, called)}")
            if spread:
                lines.append(f"2,{tokens},{called // 2},1.0")
    file = directory / "moe.csv"
    file.write_text("\n".join(lines))
    return file


def called(tokens: int) -> float:
    return NUM_EXPERTS * (1 - (1 - PER_TOKEN / NUM_EXPERTS) ** tokens)


@pytest.mark.parametrize("spread", [True, False])
def test_experts_are_called_upon_evenly(tmp_path: Path, spread: bool) -> None:
    sizes = (1, 2, 3, 8, 40, 256, 512)
    layer = read_experts(write_experts(tmp_path, spread=spread), sizes, num_layers=3)
    assert (layer.name, layer.per_step, layer.sizes) == ("moe", 3, (1, 2, 3, 8, 40, 256))
    assert layer.us == pytest.approx([expert_us(size, called(size)) for size in layer.sizes])
    assert called(1) == 2
    assert called(256) == pytest.approx(16)


def test_a_profile_with_experts_costs_them_in_every_layer(tmp_path: Path) -> None:
    write_profile(tmp_path)
    without = ProfileCost(read_profile(tmp_path, num_layers=3))
    write_experts(tmp_path)
    step = shape(decodes=8, kv=64)
    added = ProfileCost(read_profile(tmp_path, num_layers=3)).seconds(step) - without.seconds(step)
    assert added == pytest.approx(3e-6 * expert_us(8, called(8)))


def test_tables_of_which_layers_are_which_is_unknown_are_refused(tmp_path: Path) -> None:
    write_profile(tmp_path)
    write_experts(tmp_path)
    dense = tmp_path / "dense.csv"
    dense.write_text(dense.read_text() + "\ndown_proj,256,3.0")
    with pytest.raises(ConfigError, match=r"experts .* and a dense MLP \(down_proj in dense.csv\)"):
        read_profile(tmp_path, num_layers=3)
    write_profile(tmp_path)
    (tmp_path / "linear_attention.csv").touch()
    with pytest.raises(ConfigError, match="two kinds of attention"):
        read_profile(tmp_path, num_layers=3)


def test_two_kinds_of_attention_in_one_table_are_refused(tmp_path: Path) -> None:
    write_profile(tmp_path)
    lines = [f"{kind},16,16,0,0,1,{attention_us(16, 0, 0, 0)}" for kind in ("attention", "indexer")]
    header = "layer,prefill_chunk,prefill_key,n_decode,kv_decode,decode_q_len,time_us"
    (tmp_path / "attention.csv").write_text("\n".join([header, *lines]))
    with pytest.raises(ConfigError, match=r"more than one kind of attention \(attention, indexer\)"):
        read_profile(tmp_path, num_layers=3)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tokens,activated_experts,time_us\n1,2,3\n", "needs a step of one token, and larger ones"),
        ("tokens,activated_experts,time_us\n2,2,3\n4,4,5\n", "needs a step of one token"),
        ("ep,tokens,activated_experts,time_us\n2,1,1,3\n", "no rows of experts on one device"),
        ("tokens,activated_experts,time_us\n1,0,3\n2,0,4\n", "one token calls upon 0 of 0 experts"),
        ("tokens,activated_experts,time_us\n1,2,nan\n", "line 2: a value is negative, not a number"),
        ("tokens,time_us\n1,2\n", "has no column activated_experts"),
    ],
)
def test_broken_tables_of_experts_are_refused(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "moe.csv"
    file.write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_experts(file, (1, 2), num_layers=1)


def test_attention_that_takes_no_time_is_refused(tmp_path: Path) -> None:
    write_profile(tmp_path)
    file = tmp_path / "attention.csv"
    lines = file.read_text().splitlines()
    file.write_text("\n".join([*lines[:-1], lines[-1].rsplit(",", 1)[0] + ",0"]))
    with pytest.raises(ConfigError, match=r"attention.csv: a step took no time"):
        read_profile(tmp_path, num_layers=2)


def test_times_that_are_continued_do_not_fall(tmp_path: Path) -> None:
    """The card had no memory for the longest KV of 8 decodes, and the last two times happen to fall."""
    write_profile(tmp_path)
    file = tmp_path / "attention.csv"
    lines = [line for line in file.read_text().splitlines() if not line.startswith(("0,0,8,", "0,0,32,"))]
    file.write_text("\n".join([*lines, "0,0,8,16,20.0", "0,0,8,64,40.0", "0,0,8,256,1.0"]))
    grid = read_profile(tmp_path, num_layers=2).attention
    assert grid.decode_kv == (16, 64, 256, 1024)
    assert grid.decode_us[grid.decodes.index(8)] == (20.0, 40.0, 1.0, 1.0)


def test_a_byte_order_mark_is_no_part_of_a_table(tmp_path: Path) -> None:
    write_profile(tmp_path)
    tables = read_profile(tmp_path, num_layers=2)
    dense = tmp_path / "dense.csv"
    dense.write_bytes(b"\xef\xbb\xbf" + dense.read_bytes())
    assert read_profile(tmp_path, num_layers=2) == tables


def linear_us(chunk: int, before: int, num: int, kv: int) -> float:
    return 10 + 0.5 * chunk + 0.01 * before + 0.02 * num * kv + 1e-6 * chunk * before * num * kv


def grid_lines(chunks: tuple[int, ...], kv: tuple[int, ...], num: tuple[int, ...]) -> list[str]:
    prefills = [(c, b) for c in chunks for b in (0, *kv)]
    points = [(c, b, n, k) for c, b in [(0, 0), *prefills] for n in num for k in kv]
    points += [(c, b, 0, 0) for c, b in prefills]
    return [",".join(map(str, (*point, linear_us(*point)))) for point in points]


def write_union(directory: Path) -> None:
    """Grids with steps of 4, of 1.5 and of 3, their rows in no order, shared points measured twice."""
    write_profile(directory)
    lines = [
        *grid_lines((16, 64, 256), (16, 64, 256, 1024), (1, 2, 8, 32)),
        *grid_lines((16, 24, 36, 256), (16, 24, 54, 1024), (1, 2, 8, 32)),
        *grid_lines((16, 48, 144), (16, 144, 432), (1, 8)),
    ]
    lines.sort(key=lambda line: line[::-1])
    header = "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us"
    (directory / "attention.csv").write_text("\n".join([header, *lines]))


def test_three_grids_in_one_file_are_read_and_what_is_linear_stays_exact(tmp_path: Path) -> None:
    write_union(tmp_path)
    grid = read_profile(tmp_path, num_layers=2).attention
    assert grid.chunks == (16, 24, 36, 48, 64, 144, 256)
    assert grid.decode_kv == (16, 24, 54, 64, 144, 256, 432, 1024)
    assert grid.before == (0, *grid.decode_kv)
    assert grid.mixed_decodes == (1, 2, 8, 32)
    for num, row in zip(grid.decodes, grid.decode_us, strict=True):
        assert row == pytest.approx([linear_us(0, 0, num, kv) for kv in grid.decode_kv])
    for chunk, alone, line in zip(grid.chunks, grid.prefill_us, grid.mixed_us, strict=True):
        assert alone == pytest.approx([linear_us(chunk, before, 0, 0) for before in grid.before])
        for before, block in zip(grid.before, line, strict=True):
            for num, row in zip(grid.mixed_decodes, block, strict=True):
                assert row == pytest.approx([linear_us(chunk, before, num, kv) for kv in grid.decode_kv])


def test_a_point_measured_twice_has_the_mean_and_a_contradiction_is_refused(tmp_path: Path) -> None:
    write_profile(tmp_path)
    file = tmp_path / "attention.csv"
    text = file.read_text()
    file.write_text(text + "\n0,0,1,16,12.0")
    grid = read_profile(tmp_path, num_layers=2).attention
    assert grid.decode_us[0][0] == pytest.approx((attention_us(0, 0, 1, 16) + 12) / 2)
    file.write_text(text + "\n0,0,1,16,120.0")
    with pytest.raises(ConfigError, match=r"0,0,1,16 more than once, with times from 10.82 to 120 us"):
        read_profile(tmp_path, num_layers=2)


def test_a_missing_corner_is_named(tmp_path: Path) -> None:
    write_profile(tmp_path)
    file = tmp_path / "attention.csv"
    file.write_text(
        "\n".join(line for line in file.read_text().splitlines() if not line.startswith("256,512,"))
    )
    with pytest.raises(ConfigError, match=r"lacks the row 256,512,0,0, and has no rows around it"):
        read_profile(tmp_path, num_layers=2)


def test_grids_too_large_together_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_union(tmp_path)
    monkeypatch.setattr(attention_file, "_MAX_TIMES", 100)
    with pytest.raises(ConfigError, match=r"its grids together have 2,016 points; 100 are read"):
        read_profile(tmp_path, num_layers=2)


def test_decodes_of_several_tokens_are_left_out(tmp_path: Path) -> None:
    """As for speculative decoding: they are other steps, not the same ones measured again."""
    write_profile(tmp_path)
    expected = read_profile(tmp_path, num_layers=2)
    file = tmp_path / "attention.csv"
    _, *lines = file.read_text().splitlines()
    rows = [line.rsplit(",", 1) for line in lines]
    header = "layer,prefill_chunk,kv_prefill,n_decode,kv_decode,decode_q_len,time_us"
    several = [f"attention,{point},4,{3 * float(us)}" for point, us in rows if ",0,0" not in point]
    once = [f"attention,{point},1,{us}" for point, us in rows]
    file.write_text("\n".join([header, *several, *once]))
    assert read_profile(tmp_path, num_layers=2) == expected


def test_a_union_of_what_fits_the_memory_keeps_its_numbers_of_decodes(tmp_path: Path) -> None:
    """Two grids, both without the points that a small card has no KV memory for. What is missing lies beyond
    whole cells of one grid and before measured points of the other."""
    write_union(tmp_path)
    file = tmp_path / "attention.csv"
    header, *lines = file.read_text().splitlines()
    points = [tuple(map(int, line.split(",")[:4])) for line in lines]
    fits = [
        line
        for line, (chunk, before, num, kv) in zip(lines, points, strict=True)
        if num * kv + before + chunk <= 9000
    ]
    assert len(fits) < len(lines)
    file.write_text("\n".join([header, *fits]))
    grid = read_profile(tmp_path, num_layers=2).attention
    assert grid.mixed_decodes == (1, 2, 8, 32)
    assert grid.decodes == (1, 2, 8, 32)
    for num, row in zip(grid.decodes, grid.decode_us, strict=True):
        assert row == pytest.approx([linear_us(0, 0, num, kv) for kv in grid.decode_kv])


def test_a_layer_twice_and_a_file_cut_off(tmp_path: Path) -> None:
    write_profile(tmp_path)
    dense = tmp_path / "dense.csv"
    whole = dense.read_text()
    dense.write_text(whole + "\nqkv_proj,16,5.0")
    with pytest.raises(ConfigError, match=r"dense\.csv, line \d+: 'qkv_proj' of 16 tokens stands twice"):
        read_profile(tmp_path, num_layers=2)
    dense.write_text("\n".join(whole.splitlines()[:-3]))
    with pytest.raises(ConfigError, match=r"'embedding' is measured up to 64 tokens, other layers up to 256"):
        read_profile(tmp_path, num_layers=2)
    dense.write_text(whole)
    tables = read_profile(tmp_path, num_layers=2)
    assert missing_kinds(tables) == ["down_proj", "gate_up_proj", "o_proj", "sampler"]
