"""What is wrong with a machine is found, and each finding says how to mend it."""

import json
import os
import shutil
import subprocess
import sys

import psutil
import pytest

from labkit import doctor
from labkit.doctor import examine
from labkit.presets import PRESETS

VERDICTS = {"ok", "note", "bad"}


def find(what: str):
    (finding,) = [finding for finding in examine() if finding.what == what]
    return finding


def check(findings) -> None:
    for finding in findings:
        assert finding.verdict in VERDICTS
        assert finding.what and finding.detail
        assert "\n" not in finding.detail + finding.fix
        if finding.verdict != "ok":
            assert finding.fix, f"{finding.what}: {finding.detail}, and no word on what to do"


def test_this_machine():
    findings = examine()
    check(findings)
    names = [finding.what for finding in findings]
    assert len(set(names)) == len(names)
    assert {"torch", "GPU", "cores", "memory", "shared memory", "descriptors", "kernel"} <= {*names}


# In a child, since these cannot be undone.

CHILD = """
import json
from labkit.doctor import examine
print(json.dumps([(f.verdict, f.what, f.detail, f.fix) for f in examine()]))
"""


def examine_in_child(before: str = "", command=()) -> dict[str, doctor.Finding]:
    result = subprocess.run(
        [*command, sys.executable, "-c", before + CHILD],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    findings = [doctor.Finding(*row) for row in json.loads(result.stdout.splitlines()[-1])]
    check(findings)
    return {finding.what: finding for finding in findings}


def test_few_descriptors_in_a_small_shared_memory():
    mount = "mount -t tmpfs -o size=64m tmpfs /dev/shm"
    command = ["unshare", "-m", "sh", "-c", f'{mount} && exec "$@"', "sh"]
    may = shutil.which("unshare") and subprocess.run([*command, "true"]).returncode == 0
    few = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))\n"
    found = examine_in_child(few, command if may else ())
    assert found["descriptors"].verdict == "bad"
    assert "100" in found["descriptors"].detail
    assert "ulimit -n" in found["descriptors"].fix
    if may:
        assert found["shared memory"].verdict == "bad"
        assert f"{64 * 2**20:,}" in found["shared memory"].detail
        assert "--shm-size" in found["shared memory"].fix


def test_torch_that_cannot_be_imported():
    # As beside a broken driver, or a torchvision that was built for another torch.
    found = examine_in_child("import sys; sys.modules['torch'] = None\n")
    assert found["torch"].verdict == "bad"
    assert "make labs" in found["torch"].fix


def test_torchvision_for_another_torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision.ops", None)
    assert find("torch").verdict == "bad"


# Others, as if this machine were so.


@pytest.mark.parametrize("spare, verdict", [(-1, "bad"), (0, "ok")])
def test_shared_memory_is_enough_for_the_workshop(monkeypatch, spare, verdict):
    size = PRESETS["workshop"]
    needed = size.slots * size.batch * 21 * size.image**2 * 4

    class Usage:
        free = needed + spare

    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda folder: Usage)
    finding = find("shared memory")
    assert finding.verdict == verdict
    assert f"{Usage.free:,}" in finding.detail
    check([finding])


def test_no_shared_memory_folder(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "Path", lambda name: tmp_path / name.lstrip("/"))
    check(examine())
    assert find("shared memory").verdict != "bad"


def test_one_core_and_little_memory(monkeypatch):
    class Memory:
        available = 10**9

    monkeypatch.setattr(doctor, "usable_cores", lambda: 1)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: Memory)
    findings = examine()
    check(findings)
    verdicts = {finding.what: finding.verdict for finding in findings}
    assert verdicts["cores"] == "note"
    assert verdicts["memory"] == "bad"


def test_no_kernel(monkeypatch):
    from jupyter_client.kernelspec import KernelSpecManager

    monkeypatch.setattr(KernelSpecManager, "find_kernel_specs", lambda self: {"ir": "/somewhere"})
    finding = find("kernel")
    assert finding.verdict == "bad"
    assert "ipykernel install" in finding.fix


def test_nothing_beside_the_labs(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "resource", None)  # as on Windows
    monkeypatch.setattr("labkit.worker.START_METHOD", "spawn")
    findings = examine()
    check(findings)
    verdicts = {finding.what: finding.verdict for finding in findings}
    for what in ("Nsight Systems", "nvtx", "descriptors", "workers"):
        assert verdicts[what] == "note", what


def test_a_container_is_noticed(monkeypatch):
    monkeypatch.setitem(os.environ, "container", "podman")
    assert find("container").verdict == "note"


def test_torchvision_that_asks_for_another_torch(monkeypatch):
    asks = {"torchvision": ["numpy", "torch==2.0.1", "gdown>=4; extra == 'gdown'"]}
    monkeypatch.setattr(doctor.importlib.metadata, "requires", asks.get)
    finding = find("torch")
    assert finding.verdict == "bad" and "torch 2.0.1" in finding.fix
    check([finding])


def test_the_pair_that_is_installed_fits():
    assert find("torch").verdict == "ok"


def test_the_limit_of_page_locking_is_told():
    before = "import resource; resource.setrlimit(resource.RLIMIT_MEMLOCK, (4096, 4096))\n"
    assert "4,096 bytes" in examine_in_child(before)["page-locking"].detail


@pytest.mark.parametrize("level, verdict", [("2", "ok"), ("4", "note")])
def test_what_nsight_may_not_do(monkeypatch, tmp_path, level, verdict):
    setting = tmp_path / "proc/sys/kernel/perf_event_paranoid"
    setting.parent.mkdir(parents=True)
    setting.write_text(level)
    monkeypatch.setattr(doctor, "Path", lambda name: tmp_path / name.lstrip("/"))
    monkeypatch.setattr(doctor.shutil, "which", lambda name: f"/opt/{name}")
    finding = find("Nsight Systems")
    assert finding.verdict == verdict and "/opt/nsys" in finding.detail
    check([finding])
