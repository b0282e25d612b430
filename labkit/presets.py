"""Named sizes of the job. No torch here, so the command line can check names at once."""

from dataclasses import dataclass, fields, replace

from .errors import LabError

MODELS = ("deeplabv3_resnet50", "deeplabv3_mobilenet_v3_large")


@dataclass(frozen=True)
class Preset:
    """One size of the job and of the parts that run it.

    `samples` is the number of images in one run; when `batch` does not divide it, the last
    batch is smaller. `workers=0` means one for each core that the main loop leaves free.
    `slots` is how many batches may be on the host at once; `depth` how many copies may be in
    flight; `repeats` how often each strategy is timed.
    """

    name: str
    model: str
    batch: int
    image: int
    samples: int
    workers: int
    slots: int
    depth: int = 2
    repeats: int = 3

    @property
    def batches(self) -> int:
        return -(-self.samples // self.batch)


_ALL = (
    Preset("smoke", MODELS[1], batch=3, image=64, samples=17, workers=2, slots=3, repeats=1),
    Preset("workshop", MODELS[1], batch=8, image=256, samples=156, workers=2, slots=4),
    Preset("article", MODELS[0], batch=64, image=256, samples=6400, workers=0, slots=16),
)
PRESETS = {preset.name: preset for preset in _ALL}


def get_preset(name: str, device_kind: str, **changes: int | None) -> Preset:
    """The preset called `name`; `auto` is `article` on a GPU and `workshop` without one.

    `changes` are fields to replace, and `batches`; None leaves a field as it is.
    Raises LabError for an unknown name and for a count below one.
    """
    if name == "auto":
        name = "article" if device_kind == "cuda" else "workshop"
    if name not in PRESETS:
        raise LabError(f"unknown preset {name!r}: choose auto, {', '.join(PRESETS)}")
    preset = PRESETS[name]
    changes = {key: value for key, value in changes.items() if value is not None}
    for key, value in changes.items():
        if key == "model":
            check_model(value)
        else:
            check_count(key, value)
    if "batches" in changes or ("batch" in changes and "samples" not in changes):
        # From a full last batch as many are missing as before, if it can be.
        missing = preset.batches * preset.batch - preset.samples
        batch, batches = changes.get("batch", preset.batch), changes.pop("batches", preset.batches)
        changes["samples"] = batches * batch - min(missing, batch - 1)
    unknown = changes.keys() - {field.name for field in fields(Preset)}
    if unknown:
        raise LabError(f"a preset has no field {sorted(unknown)[0]!r}")
    preset = replace(preset, **changes)
    check_depth(preset.depth, preset.slots)
    return preset


def check_model(name: str) -> str:
    """`name`, or a LabError when the labs have no such model."""
    if name not in MODELS:
        raise LabError(f"unknown model {name!r}: choose {', '.join(MODELS)}")
    return name


def check_count(name: str, value: int) -> int:
    """`value`, or a LabError that names it when it is not a whole number of at least one."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise LabError(f"{name} must be a whole number, got {value!r}")
    if value < 1:
        raise LabError(f"{name} must be at least 1, got {value}")
    return value


def check_depth(depth: int, slots: int) -> int:
    """`depth`, or a LabError unless every copy in flight can have a slot of its own."""
    check_count("depth", depth)
    if depth > slots:
        raise LabError(
            f"depth {depth} needs at least {depth} slots, got {slots}: raise slots or lower depth"
        )
    return depth
