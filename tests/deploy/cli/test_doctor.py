"""Tests of `sluice doctor`: each thing that is missing is a finding with its remedy, and the kept measurement."""

import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.cli import doctor, machine_speed
from deploy.cli.doctor import Finding, judged_speed, report
from deploy.cli.machine_speed import Modules, Speed, kept_speed, measured_speed, memory_modules
from tests.deploy.cli.harness import sluice
from tests.patience import PATIENCE_S

SPEED = Speed(20.0, 100.0, None)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return tmp_path / "cache"


def structure(kind: int, body: bytes, strings: bytes = b"\0\0") -> bytes:
    return bytes([kind, len(body) + 4, 0, 0]) + body + strings


def module(*, rate: int, configured: int, size: int = 16384, width: int = 64) -> bytes:
    body = bytearray(0x28 - 4)
    struct.pack_into("<HH", body, 0x0A - 4, width, size)
    struct.pack_into("<H", body, 0x15 - 4, rate)
    struct.pack_into("<H", body, 0x20 - 4, configured)
    return structure(machine_speed.MODULE, bytes(body), b"DIMM A1\0Bank 0\0\0")


def test_doctor_reports_every_check_and_imports_no_torch() -> None:
    program = (
        "import sys; from deploy.cli.main import main; code = main(['doctor', '--quick', '--json']); "
        "sys.exit(code if 'torch' not in sys.modules else 9)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_S)
    found = json.loads(done.stdout)
    assert found.keys() == {*doctor.CHECKS, "memory speed"}
    assert done.returncode == any(one["verdict"] == "bad" for one in found.values())


def test_what_is_missing_is_named_with_the_command_that_mends_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "find_spec", lambda name: None if name == "safetensors" else object())
    code, out, _ = sluice(capsys, "doctor", "--quick")
    assert code == 1
    assert f"→ {sys.executable} -m pip install safetensors" in out
    assert out.splitlines()[-1].startswith("1 to mend before a server works")


def test_kernels_say_which_set_serves_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLUICE_ISA", raising=False)
    monkeypatch.setattr(doctor, "ON_ARM", False)
    monkeypatch.setattr(doctor, "sets_of_processor", lambda: ("avx2", "avx512"))
    monkeypatch.setattr(doctor, "sets_in_use", lambda environment, found: ("avx512",))
    monkeypatch.setattr(doctor, "existing", lambda sets: Path("/x/lib.so"))
    assert doctor._kernels() == Finding("ok", "C with avx512: the best this processor has (lib.so)")
    monkeypatch.setattr(doctor, "sets_in_use", lambda environment, found: ("avx2",))
    capped = doctor._kernels()
    assert (capped.verdict, capped.remedy) == ("note", "unset SLUICE_ISA")
    assert "this processor has avx512" in capped.text
    monkeypatch.setattr(doctor, "existing", lambda sets: None)
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setenv("PATH", "/nowhere")
    assert doctor._kernels().remedy == doctor.INSTALL_COMPILER
    monkeypatch.setenv("CC", sys.executable)
    assert doctor._kernels().remedy == "sluice env --build"
    monkeypatch.setattr(doctor, "sets_in_use", lambda environment, found: ())
    assert doctor._kernels().text.startswith("plain PyTorch")
    monkeypatch.setenv("SLUICE_NATIVE", "0")
    assert doctor._kernels().remedy == "unset SLUICE_NATIVE"


def test_wrong_instruction_set_must_be_mended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLUICE_ISA", "mmx")
    assert (found := doctor._kernels()).verdict == "bad" and "mmx" in found.text


def test_quota_of_a_control_group_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert doctor._quota(tmp_path) == 1.5
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert doctor._quota(tmp_path) == 0
    monkeypatch.setattr(doctor, "usable_cores", lambda: 4)
    monkeypatch.setattr(doctor, "_quota", lambda: 1.5)
    assert doctor._processor().remedy == "sluice serve --threads 1"


def test_cache_that_others_can_write_to_must_be_mended(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_cache.mkdir()
    (own_cache / "sluice").write_text("a file in its place")
    assert doctor._cache().verdict == "bad"


def test_little_disk_is_a_note_with_its_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "not" / "made" / "yet"))
    assert doctor.free_disk(doctor.hub_cache()) > 0
    monkeypatch.setattr(doctor, "free_disk", lambda folder: 1 << 30)
    assert "sluice models --rm" in doctor._disk().remedy


def test_modules_of_the_firmware_say_what_memory_should_deliver(tmp_path: Path) -> None:
    tables = tmp_path / "DMI"
    empty = module(rate=0, configured=0, size=0)
    modules = module(rate=5600, configured=4800) + empty + module(rate=5600, configured=5600)
    tables.write_bytes(structure(0, bytes(8), b"vendor\0\0") + modules + structure(127, b"") + b"rest")
    assert memory_modules(tables) == Modules(2, 4800, (4800 + 5600) * 8 / 1000)
    tables.write_bytes(structure(machine_speed.END, b""))
    assert memory_modules(tables) is None
    tables.write_bytes(module(rate=4800, configured=4800)[:20])
    assert memory_modules(tables) is None, "a table that is cut off"
    assert memory_modules(tmp_path / "none") is None


def test_measured_speed_is_judged_by_what_the_modules_allow() -> None:
    modules = Modules(2, 4800, 76.8)
    assert judged_speed(Speed(60.0, 1.0, None), modules).verdict == "ok"
    slow = judged_speed(SPEED, modules)
    assert slow.verdict == "note" and "20.0 GB/s" in slow.text and "at most 77 GB/s" in slow.text
    assert "--measure" in judged_speed(Speed(20.0, 1.0, None, busy=True), modules).remedy
    assert judged_speed(SPEED, None).verdict == "ok" and "unknown" in judged_speed(SPEED, None).text
    assert judged_speed(None, modules).text.startswith("not measured")


def test_measurement_is_kept_until_the_machine_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    results = [SPEED, Speed(30.0, 100.0, None), Speed(40.0, 100.0, None)]
    monkeypatch.setattr(machine_speed, "_measured", lambda: results.pop(0))
    monkeypatch.setattr(machine_speed, "_library", lambda: "lib.so")
    monkeypatch.setattr(machine_speed, "is_busy", lambda: False)
    assert kept_speed() is None
    assert measured_speed() == SPEED == kept_speed() == measured_speed()
    assert measured_speed(again=True) == Speed(30.0, 100.0, None) == kept_speed()
    monkeypatch.setattr(machine_speed, "usable_cores", lambda: 99)
    assert kept_speed() is None and measured_speed() == Speed(40.0, 100.0, None)
    monkeypatch.setattr(machine_speed, "_library", lambda: "")
    assert measured_speed() is None


def test_measurement_of_a_busy_machine_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    results, busy = [Speed(3.0, 10.0, None), SPEED], [True, True, False, False]
    monkeypatch.setattr(machine_speed, "_measured", lambda: results.pop(0))
    monkeypatch.setattr(machine_speed, "_library", lambda: "lib.so")
    monkeypatch.setattr(machine_speed, "is_busy", lambda: busy.pop(0))
    low = Speed(3.0, 10.0, None, busy=True)
    assert [measured_speed() for _ in range(4)] == [low, low, SPEED, SPEED]


def test_report_has_a_line_for_each_finding_and_its_remedy() -> None:
    lines = report({"a": Finding("ok", "fine"), "bc": Finding("note", "slow", "mend it")})
    assert lines == [
        "ok    a   fine",
        "note  bc  slow",
        "          → mend it",
        "",
        "a server works here; 1 to make it better",
    ]
