"""The labs' own job: photographs in, DeepLabV3's score for every pixel and class out."""

import functools
import io
import os
from importlib import resources
from pathlib import Path

import numpy as np
import torch
import xxhash
from PIL import Image, ImageOps

from .errors import LabError
from .job import Job
from .presets import Preset, check_model

# Photographs among the samples in scikit-image's wheel; its other ones are drawings and scans.
_SAMPLES = ("astronaut.png", "chelsea.png", "coffee.png", "hubble_deep_field.jpg",
            "motorcycle_left.png", "retina.jpg", "rocket.jpg")  # fmt: skip
_SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".webp"}
# Mean and standard deviation of ImageNet's red, green and blue, which torchvision's weights
# were trained with: https://docs.pytorch.org/vision/stable/models.html
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class WeightsError(LabError):
    """The pretrained weights could not be had."""


class Segmenter(torch.nn.Module):
    """Images [n, 3, h, w] uint8 to scores [n, 21, h, w] float32: normalise, DeepLabV3, `out`.

    Normalising on the device keeps the upload small: a byte a value instead of four.
    """

    def __init__(self, network: torch.nn.Module):
        super().__init__()
        self.network = network
        network.aux_classifier = None  # only `out` travels
        self.register_buffer("mean", 255 * torch.tensor(_MEAN)[:, None, None])
        self.register_buffer("std", 255 * torch.tensor(_STD)[:, None, None])

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.network((images - self.mean) / self.std)["out"]


def segmentation_job(
    preset: Preset,
    device,
    process="archive",
    images: str | Path | None = None,
    weights: str = "random",
) -> Job:
    """The labs' job in the size of `preset`, on an open `device`.

    `process` is "archive", "class_map", or any importable function; `images` a folder of
    photographs, scikit-image's samples unless given. Raises LabError for an unknown name and a
    bad folder, WeightsError for missing weights.
    """
    if isinstance(process, str):
        known = {function.__name__: function for function in (archive, class_map)}
        if process not in known:
            raise LabError(f"unknown process {process!r}: choose {', '.join(known)}")
        process = known[process]
    photographs = load_images(images, preset.image, preset.samples)
    model = build_model(preset.model, weights)
    return Job(model, photographs, process, device, preset.batch, preset.samples, preset.model)


def build_model(name: str, weights: str = "random") -> Segmenter:
    """DeepLabV3 from torchvision in eval mode. Only `weights="pretrained"` uses the network.

    Random weights are the same each time. They segment nothing, but they cost the same.
    """
    from torchvision.models import get_model_weights, segmentation

    build = getattr(segmentation, check_model(name))
    if weights == "random":
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            network = build(weights=None, weights_backbone=None)
            _set_statistics(network)
    elif weights == "pretrained":
        try:
            known = get_model_weights(name).DEFAULT
            # Not left to torchvision, which executes what a file in its cache says.
            state = known.get_state_dict(check_hash=True, weights_only=True)
            network = build(
                weights_backbone=None, num_classes=len(known.meta["categories"]), aux_loss=True
            )
            network.load_state_dict(state)
        except Exception as error:  # URLError, a truncated or corrupt file, a wrong hash, ...
            folder = Path(torch.hub.get_dir()) / "checkpoints"
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            raise WeightsError(
                f"the pretrained weights of {name} could not be had ({reason}): check the "
                f"network, delete a broken file in {folder}, or go on with weights='random'"
            ) from None
    else:
        raise LabError(f"unknown weights {weights!r}: choose random, pretrained")
    return Segmenter(network).eval()


def _set_statistics(network: torch.nn.Module) -> None:
    """Give the batch norms the statistics of noise.

    With those that they start from, the signal of a deep network dies out on its way: the scores
    are the same for every image, and a wrong batch in place of a right one goes unseen.
    """
    for module in network.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.momentum = 1.0
    with torch.no_grad():
        network.train()(torch.randn(4, 3, 64, 64))


def load_images(folder: str | Path | None, size: int, limit: int) -> torch.Tensor:
    """Up to `limit` photographs, cut and resized to squares: uint8 [n, 3, size, size].

    Raises LabError, naming the file, for a folder without images and for one that is broken.
    """
    if not folder:
        source = resources.files("skimage.data")
        paths = [source / name for name in _SAMPLES]
    else:
        source = Path(folder)
        if not source.is_dir():
            raise LabError(f"no image folder at {str(folder)!r}: give a folder of photographs")
        try:
            paths = sorted(path for path in source.iterdir() if path.suffix.lower() in _SUFFIXES)
        except OSError as error:
            raise LabError(
                f"cannot read the image folder {str(folder)!r}: {error.strerror}"
            ) from None
        if not paths:
            kinds = ", ".join(sorted(_SUFFIXES))
            raise LabError(f"no images in {str(folder)!r}: it needs files that end in {kinds}")
    return torch.stack([_load_image(path, size) for path in paths[:limit]])


def _load_image(path, size: int) -> torch.Tensor:
    if not path.is_file():  # a pipe would be waited for
        raise LabError(f"cannot read the image {str(path)!r}: it is no file")
    try:
        with path.open("rb") as file, Image.open(file) as image:
            square = ImageOps.fit(image.convert("RGB"), (size, size))
    except Exception as error:  # PIL raises many kinds for a broken or hostile file
        raise LabError(f"cannot read the image {str(path)!r}: {error}") from None
    return torch.from_numpy(np.asarray(square).transpose(2, 0, 1).copy())


def archive(
    batch: int, scores: torch.Tensor, sink: str | Path = os.devnull, batch_bytes: int = 0
) -> str:
    """Write every byte of `scores` to `sink` and return a fingerprint of them.

    The bytes are copied out once, as any serialiser does. For a file, `batch_bytes` is the
    size of a full batch: batch number `batch` goes to its own place, whoever writes it.
    """
    data = _bytes_of(scores).tobytes()
    descriptor = os.open(sink, os.O_WRONLY | os.O_CREAT, 0o644)
    with os.fdopen(descriptor, "wb") as file:
        if batch_bytes:
            file.seek(batch * batch_bytes)
        file.write(data)
    return xxhash.xxh3_128_hexdigest(data)


def class_map(batch: int, scores: torch.Tensor, folder: str | Path | None = None) -> list[str]:
    """The best class of each pixel as one palette PNG per image: scores [n, classes, h, w].

    Returns a fingerprint of each PNG. With `folder`, writes them there as
    `BATCH_IMAGE.png`.
    """
    fingerprints = []
    for number, image in enumerate(scores.argmax(dim=1).to(torch.uint8)):
        picture = Image.fromarray(image.numpy(), mode="P")
        picture.putpalette(_palette())
        encoded = io.BytesIO()
        picture.save(encoded, "PNG")
        if folder is not None:
            Path(folder, f"{batch:06}_{number:03}.png").write_bytes(encoded.getbuffer())
        fingerprints.append(xxhash.xxh3_128_hexdigest(encoded.getbuffer()))
    return fingerprints


def _bytes_of(tensor: torch.Tensor) -> np.ndarray:
    # As uint8, since NumPy has no bfloat16.
    return tensor.contiguous().view(-1).view(torch.uint8).numpy()


@functools.cache
def _palette() -> list[int]:
    """256 colours that differ: the bits of the class number spread over red, green and blue."""
    colours = []
    for number in range(256):
        for channel in range(3):
            bits = [number >> (3 * i + channel) & 1 for i in range(3)]
            colours.append(sum(bit << (7 - i) for i, bit in enumerate(bits)))
    return colours
