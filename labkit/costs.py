"""Costs: what each stage of one job takes on one machine, as `labkit calibrate` measured it.

A file of them is a hardware profile. The predictor (prediction.py) calculates from nothing else,
and the emulated device can run at a profile's rates.
"""

from dataclasses import asdict, dataclass, replace
from pathlib import Path

from .errors import LabError
from .hardware import HardwareProfile, describe_device
from .results import NUMBER, STAMP, load_json, object_schema, write_json

_SHIPPED = Path(__file__).parent.parent / "figures" / "profiles" / "h200.json"
# Seconds for a full batch. A copy is `fresh` into memory that was just allocated, `touched` into
# a pool's pageable slot, and plainly a copy into a page-locked one.
STAGES = {
    "upload": "images to the device",
    "queue": "the main loop's time to queue a forward",
    "forward": "the model on the device",
    "fresh copy": "scores into host memory that is new, so that its pages are made first",
    "touched copy": "scores into pageable memory that was used before",
    "copy": "scores into page-locked memory",
    "send": "scores through a pipe to a worker",
    "process": "post-processing in a worker",
    "process in the loop": "post-processing in the main loop",
    "hand-over": "a message to a worker and back",
}
# Those that take longer the more bytes there are of scores.
WITH_SCORES = ("fresh copy", "touched copy", "copy", "send", "process", "process in the loop")
_SECONDS = {"type": "number", "minimum": 1e-9, "maximum": 1e6}
_SHARES = {
    "type": "object",
    "propertyNames": {"enum": list(STAGES)},
    "additionalProperties": {"type": "number", "minimum": 0, "maximum": 1000},
}
_SPREAD = {"type": "array", "items": NUMBER, "minItems": 2, "maxItems": 2}
SCHEMA = object_schema(
    **STAMP,
    input_bytes={"type": "integer", "minimum": 0, "maximum": 10**12},
    workers={"type": "integer", "minimum": 1, "maximum": 10_000},
    seconds=object_schema(**dict.fromkeys(STAGES, _SECONDS)),
    spread=object_schema(**dict.fromkeys(STAGES, _SPREAD)),
    slowdowns={
        "type": "object",
        "propertyNames": {"enum": list(STAGES)},
        "additionalProperties": _SHARES,
    },
    once=object_schema(start_workers_s=NUMBER, touch_s_per_gb=NUMBER, page_lock_s_per_gb=NUMBER),
    rates=object_schema(
        flops_per_s=NUMBER, pageable_bytes_per_s=NUMBER, pinned_bytes_per_s=NUMBER, launch_s=NUMBER
    ),
)


@dataclass(frozen=True)
class Costs:
    """`seconds` by stage, see STAGES, and of each the lowest and highest that were seen.

    `slowdowns[stage][other]` is how much longer `stage` takes beside one `other`: 0.25 is a
    quarter; what is not in it does not disturb. `once` is paid once in a run of any length.
    `rates` are what the emulated device needs. `device`, `host` and `job` are as in a record,
    `workers` is how many there were.
    """

    created: str
    device: dict
    host: dict
    job: dict
    input_bytes: int
    workers: int
    seconds: dict[str, float]
    spread: dict[str, list[float]]
    slowdowns: dict[str, dict[str, float]]
    once: dict[str, float]
    rates: dict[str, float]

    @property
    def batch(self) -> int:
        return self.job["batch"]

    @property
    def output_bytes(self) -> int:
        return self.job["output_bytes"]

    @property
    def name(self) -> str:
        """The machine in words, which never pass an emulated device off as a GPU."""
        return describe_device(self.device)

    def scaled(self, seconds: dict[str, float], **job) -> "Costs":
        """The same machine with other `seconds` of some stages and other entries of the job."""
        return replace(self, seconds={**self.seconds, **seconds}, job={**self.job, **job})

    def hardware(self) -> HardwareProfile:
        """What the emulated device runs from. Raises LabError for one that was emulated itself."""
        if self.device["kind"] != "cuda":
            raise LabError("this profile was taken on an emulated device: emulate a GPU's profile")
        name = self.device["name"]
        return HardwareProfile(name, f"calibrated on {name}, {self.created}", **self.rates)


def save_costs(costs: Costs, path: str | Path) -> Path:
    """Write a hardware profile. Raises LabError when it cannot be written."""
    return write_json({"schema": 1, **asdict(costs)}, path, "hardware profile")


def load_costs(path: str | Path) -> Costs:
    """Read a hardware profile. Raises LabError in one line for anything that is not one."""
    content = load_json(path, SCHEMA, "hardware profile")
    return Costs(**{key: content[key] for key in Costs.__dataclass_fields__})


def shipped_costs() -> Costs:
    """The hardware profile that comes with the labs: an NVIDIA H200, calibrated for their job."""
    return load_costs(_SHIPPED)


def costs_table(costs: Costs):
    """Costs as a rich table: milliseconds of each stage alone, and what disturbs it."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    job = costs.job
    title = f"{job['model']}, batches of {job['batch']} x {job['image']}² - {costs.name}"
    table = Table(title=escape(title), title_justify="left", box=box.SIMPLE, padding=(0, 1))
    table.add_column("ms a batch")
    for name in ("median", "min to max"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("longer beside one")
    for stage, seconds in costs.seconds.items():
        low, high = costs.spread[stage]
        beside = costs.slowdowns.get(stage, {})
        table.add_row(
            stage,
            f"{seconds * 1e3:,.2f}",
            f"{low * 1e3:,.2f} to {high * 1e3:,.2f}",
            ", ".join(f"{other} {share:+.0%}" for other, share in beside.items() if share >= 0.01),
        )
    return table
