"""The labs' own job: model, weights, photographs, post-processing, and Job itself."""

import contextlib
import functools
import gc
import inspect
import itertools
import pickle
import socket
import struct
import urllib.request
import weakref
import zlib

import numpy as np
import pytest
import torch
from PIL import Image

from labkit import Job, LabError, archive, class_map, digest, get_preset, open_device
from labkit.presets import MODELS
from labkit.workload import WeightsError, build_model, load_images, segmentation_job

SMALL = MODELS[1]
CLASSES = 21


def one_line(error) -> str:
    text = str(error.value)
    assert text.strip() and "\n" not in text
    return text


# The model and its weights.


@pytest.fixture
def offline(monkeypatch, tmp_path):
    """No network, and no weights kept from before; the folder torch.hub keeps them in."""

    def refuse(*args, **kwargs):
        raise OSError("the network is blocked")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(urllib.request, "urlopen", refuse)
    monkeypatch.setattr(torch.hub, "urlopen", refuse)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    folder = tmp_path / "hub" / "checkpoints"
    folder.mkdir(parents=True)
    return folder


@pytest.mark.parametrize("name", MODELS)
def test_random_weights_need_no_network(offline, name):
    model = build_model(name)
    assert not any(module.training for module in model.modules())
    with torch.inference_mode():
        scores = model(load_images(None, 32, 4))
    # One tensor: `out`, and not the dictionary with `aux` that torchvision returns.
    assert type(scores) is torch.Tensor
    assert scores.shape == (4, CLASSES, 32, 32)
    assert scores.dtype == torch.float32
    # Else one batch's scores in place of another's would go unseen in every digest.
    maps = scores.argmax(dim=1)
    for one, other in itertools.combinations(range(4), 2):
        assert not torch.equal(scores[one], scores[other]), "the scores do not depend on the image"
        assert not torch.equal(maps[one], maps[other]), "the classes do not depend on the image"


@pytest.fixture(scope="module")
def model():
    return build_model(SMALL)


def test_random_weights_are_the_same_each_time(model):
    torch.manual_seed(7)
    state = torch.get_rng_state()
    again = build_model(SMALL)
    assert torch.equal(torch.get_rng_state(), state), "the caller's random numbers were used"
    ours, theirs = model.state_dict(), again.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_an_image_scores_the_same_alone_and_in_a_batch(model):
    images = load_images(None, 32, 4)
    with torch.inference_mode():
        together = model(images)
        alone = torch.cat([model(image[None]) for image in images])
    assert (alone - together).abs().max() < 1e-3 * together.std()
    assert (together[0] - together[1]).abs().max() > 1e-2 * together.std()


def test_images_are_normalised_as_the_weights_expect(model):
    seen = []
    hook = model.network.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    with torch.inference_mode():
        model(torch.full((1, 3, 32, 32), 255, dtype=torch.uint8))
    hook.remove()
    expected = [(1 - mean) / std for mean, std in
                zip((0.485, 0.456, 0.406), (0.229, 0.224, 0.225), strict=True)]  # fmt: skip
    assert seen[0][0, :, 5, 5].tolist() == pytest.approx(expected, rel=1e-4)


def checkpoint(folder):
    from torchvision.models.segmentation import DeepLabV3_MobileNet_V3_Large_Weights as Weights

    return folder / Weights.DEFAULT.url.rpartition("/")[2]


def test_pretrained_without_a_network(offline):
    with pytest.raises(WeightsError) as error:
        build_model(SMALL, "pretrained")
    assert "weights='random'" in one_line(error)


@pytest.mark.parametrize("contents", ["empty", "a web page", "truncated", "another model's"])
def test_pretrained_from_a_broken_file(offline, tmp_path, contents):
    torch.save({"weight": torch.arange(10_000.0)}, tmp_path / "whole.pth")
    whole = (tmp_path / "whole.pth").read_bytes()
    checkpoint(offline).write_bytes(
        {
            "empty": b"",
            "a web page": b"<html>\n<body>\nplease log in\n</body>\n",
            "truncated": whole[: len(whole) // 2],
            "another model's": whole,
        }[contents]
    )
    with pytest.raises(WeightsError) as error:
        build_model(SMALL, "pretrained")
    assert str(offline) in one_line(error), "it must say which folder to look into"


def test_pretrained_from_a_good_file(offline):
    from torchvision.models.segmentation import deeplabv3_mobilenet_v3_large

    torch.manual_seed(1)
    theirs = deeplabv3_mobilenet_v3_large(weights=None, weights_backbone=None, aux_loss=True)
    torch.save(theirs.state_dict(), checkpoint(offline))
    ours = build_model(SMALL, "pretrained")
    kept = {k: v for k, v in theirs.state_dict().items() if not k.startswith("aux")}
    got = ours.network.state_dict()
    assert got.keys() == kept.keys()
    assert all(torch.equal(got[name], kept[name]) for name in kept)
    assert not any(module.training for module in ours.modules())


def test_unknown_model_and_weights():
    with pytest.raises(LabError, match="unknown model 'resnet'"):
        build_model("resnet")
    with pytest.raises(LabError, match="unknown weights 'best'"):
        build_model(SMALL, "best")


# Photographs.


def solid(path, colour, size=(40, 30)):
    Image.new("RGB", size, colour).save(path)


def test_samples_are_photographs():
    images = load_images(None, 64, 100)
    assert images.shape[1:] == (3, 64, 64)
    assert images.dtype == torch.uint8
    assert len(images) >= 5
    for image in images:
        pixels = image.permute(1, 2, 0).numpy()
        assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 500, "few colours: a drawing?"
        grey = pixels.mean(axis=2)
        neighbours = np.corrcoef(grey[:, 1:].ravel(), grey[:, :-1].ravel())[0, 1]
        assert neighbours > 0.3, "no likeness between neighbours: noise?"
    for one, other in itertools.combinations(images, 2):
        assert not torch.equal(one, other)


def test_limit_takes_the_first_ones():
    assert torch.equal(load_images(None, 16, 2), load_images(None, 16, 100)[:2])


def test_folder_is_read_in_the_order_of_names(tmp_path):
    solid(tmp_path / "c.bmp", (0, 0, 255))
    solid(tmp_path / "a.JPG", (255, 0, 0))
    solid(tmp_path / "b.png", (0, 255, 0))
    (tmp_path / "notes.txt").write_text("no image")
    images = load_images(tmp_path, 8, 10)
    assert images.shape == (3, 3, 8, 8)
    colours = images.float().mean(dim=(2, 3))
    assert colours.argmax(dim=1).tolist() == [0, 1, 2]  # red, green, blue
    assert (colours.max(dim=1).values > 240).all()
    assert len(load_images(str(tmp_path), 8, 2)) == 2


def test_images_are_cut_and_not_squeezed(tmp_path):
    wide = Image.new("RGB", (90, 30), (255, 0, 0))
    wide.paste((0, 255, 0), (30, 0, 60, 30))
    wide.save(tmp_path / "wide.png")
    (image,) = load_images(tmp_path, 30, 1)
    assert image[:, :, 2:-2].unique(dim=2).squeeze().shape[0] == 3
    assert image[0].max() == 0, "some red of the sides is left"
    assert image[1].min() == 255


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "I;16"])
def test_other_colour_modes_become_rgb(tmp_path, mode):
    Image.new(mode, (20, 20)).save(tmp_path / "image.png")
    assert load_images(tmp_path, 8, 1).shape == (1, 3, 8, 8)


def bomb() -> bytes:
    """A PNG of a hundred bytes that claims to be 60000 x 60000."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    return (b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header)
            + chunk(b"IDAT", zlib.compress(bytes(100))) + chunk(b"IEND", b""))  # fmt: skip


def break_image(path, how: str) -> None:
    if how == "empty":
        path.touch()
    elif how == "text":
        path.write_text("no image\nat all")
    elif how == "truncated":
        Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)).save(path)
        path.write_bytes(path.read_bytes()[:5000])
    elif how == "bomb":
        path.write_bytes(bomb())
    elif how == "a folder":
        path.mkdir()
    elif how == "a dangling link":
        path.symlink_to("nowhere")


HOWS = ["empty", "text", "truncated", "bomb", "a folder", "a dangling link"]


@pytest.mark.parametrize("how", HOWS)
def test_a_broken_image_is_named(tmp_path, how):
    solid(tmp_path / "a.png", (1, 2, 3))
    break_image(tmp_path / "broken.png", how)
    with pytest.raises(LabError) as error:
        load_images(tmp_path, 8, 10)
    assert "broken.png" in one_line(error)


def test_folders_without_images(tmp_path):
    with pytest.raises(LabError) as error:
        load_images(tmp_path / "missing", 8, 1)
    assert "missing" in one_line(error)
    with pytest.raises(LabError) as error:
        load_images(tmp_path, 8, 1)
    assert str(tmp_path) in one_line(error)
    solid(tmp_path / "file.png", (1, 2, 3))
    with pytest.raises(LabError) as error:
        load_images(tmp_path / "file.png", 8, 1)
    assert "file.png" in one_line(error)


# Post-processing.


def scores_of(*shape, dtype=torch.float32, seed=0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 0, 2)])
def test_archive_writes_every_byte_to_its_place(tmp_path, order, dtype):
    batches = [scores_of(n, CLASSES, 4, 4, dtype=dtype, seed=n) for n in (3, 3, 3, 2)]
    sink = tmp_path / "scores.bin"
    process = functools.partial(archive, sink=sink, batch_bytes=batches[0].nbytes)
    for index in order:
        process(index, batches[index])
    written = torch.frombuffer(bytearray(sink.read_bytes()), dtype=dtype)
    assert torch.equal(written, torch.cat(batches).flatten())


def test_archive_sees_one_flipped_bit():
    scores = scores_of(2, CLASSES, 8, 8)
    fingerprint = archive(0, scores)
    assert archive(0, scores.clone()) == fingerprint
    assert archive(0, scores.transpose(2, 3).contiguous().transpose(2, 3)) == fingerprint
    last = scores.nbytes - 1
    for place in (0, 1, 4097 % last, last // 2, last):
        wrong = scores.clone()
        wrong.view(-1).view(torch.uint8)[place] ^= 1
        assert archive(0, wrong) != fingerprint, f"byte {place}"


def test_archive_to_the_null_device_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert archive(3, scores_of(1, CLASSES, 4, 4))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_class_maps_decode_to_the_best_class(tmp_path, dtype):
    scores = scores_of(3, CLASSES, 16, 16, dtype=dtype)
    fingerprints = class_map(12, scores, folder=tmp_path)
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == [f"000012_00{n}.png" for n in range(3)]
    for file, image in zip(files, scores.float().numpy(), strict=True):
        with Image.open(file) as picture:
            assert picture.mode == "P"
            assert np.array_equal(np.asarray(picture), image.argmax(axis=0))
    assert len(set(fingerprints)) == 3
    assert class_map(0, scores) == fingerprints, "the same with files and without"


def test_class_map_sees_one_changed_pixel():
    scores = scores_of(2, CLASSES, 8, 8)
    wrong = scores.clone()
    wrong[1, (int(scores[1, :, 3, 3].argmax()) + 1) % CLASSES, 3, 3] = 100
    one, other = class_map(0, scores), class_map(0, wrong)
    assert one[0] == other[0]
    assert one[1] != other[1]


def test_each_class_has_its_colour(tmp_path):
    scores = torch.eye(CLASSES).view(1, CLASSES, CLASSES, 1)  # row n is class n
    class_map(0, scores, folder=tmp_path)
    with Image.open(tmp_path / "000000_000.png") as picture:
        colours = np.asarray(picture.convert("RGB")).reshape(-1, 3)
    assert len({tuple(colour) for colour in colours}) == CLASSES


@pytest.mark.parametrize("process", [archive, class_map])
def test_processes_can_be_sent_to_workers(process):
    assert pickle.loads(pickle.dumps(process)) is process
    partial = pickle.loads(pickle.dumps(functools.partial(process, batch=1)))
    assert partial.func is process
    assert list(inspect.signature(process).parameters)[:2] == ["batch", "scores"]


# Job.


class HostDevice:
    """The host as a device, so that these tests are about Job alone."""

    kind = "host"

    def __init__(self):
        self.locked = []

    def page_lock(self, tensor):
        self.locked.append(tensor.data_ptr())

    def page_unlock(self, tensor):
        self.locked.remove(tensor.data_ptr())

    def load(self, model, inputs):
        return model

    def upload(self, host):
        return host.clone()

    def current_stream(self):
        return None

    def stream(self, stream):
        return contextlib.nullcontext()

    def synchronize(self):
        pass


def make_job(distinct: int, batch: int, samples: int | None = None, **options) -> Job:
    """A job whose inputs are the numbers from zero to `distinct` - 1."""
    inputs = torch.arange(distinct, dtype=torch.float32)[:, None]
    device = options.pop("device", None) or HostDevice()
    return Job(torch.nn.Identity(), inputs, archive, device, batch, samples, **options)


def numbers(job: Job) -> list[list[int]]:
    return [batch.flatten().int().tolist() for batch in job.batches()]


def test_every_input_comes_once_and_in_order():
    job = make_job(7, batch=3)
    assert (job.count, job.samples) == (3, 7)
    assert numbers(job) == [[0, 1, 2], [3, 4, 5], [6]]
    assert numbers(job) == numbers(job), "a second run must see the same"
    assert job.output_shape == (3, 1)
    assert job.output_bytes == 3 * 4


@pytest.mark.parametrize("distinct", range(1, 10))
@pytest.mark.parametrize("batch", [1, 2, 3, 4, 6, 9, 20])
def test_repeated_inputs(distinct, batch):
    for samples in (distinct + 1, 5 * batch, 5 * batch + 1):
        batches = numbers(make_job(distinct, batch, samples))
        assert [len(b) for b in batches[:-1]] == [batch] * (len(batches) - 1)
        assert sum(map(len, batches)) == samples
        assert all(0 <= number < distinct for b in batches for number in b)
        if distinct == 1:
            continue
        for before, after in itertools.pairwise(batches):
            assert before[: len(after)] != after, "an old batch's bytes would go unseen"


def test_first_keeps_every_shape():
    job = make_job(7, batch=3)
    assert [len(b) for b in numbers(job.first(2))] == [3, 1]
    assert numbers(job.first(10)) == numbers(job)
    assert numbers(job) == [[0, 1, 2], [3, 4, 5], [6]], "the whole job must stay whole"


def test_no_input_no_batch_no_sample():
    for counts in ((0, 1), (0, 1, 5), (3, 0), (3, -1), (3, 1.5), (3, True), (3, 1, 0)):
        with pytest.raises(LabError) as error:
            make_job(*counts)
        one_line(error)


def test_inputs_are_page_locked_until_the_job_ends():
    device = HostDevice()
    job = make_job(4, 2, device=device)
    assert device.locked == [job.inputs.data_ptr()]
    job.close()
    job.close()
    assert device.locked == []
    job = make_job(4, 2, device=device)
    gone = weakref.ref(job)
    del job
    gc.collect()
    assert gone() is None
    assert device.locked == []


def test_two_jobs_may_share_their_inputs():
    # As when the cell that makes a job runs twice and the one that makes its inputs once.
    device = open_device("emulated")
    inputs = torch.arange(4.0)[:, None]
    jobs = [Job(torch.nn.Identity(), inputs, archive, device, 2) for _ in range(2)]
    for job in jobs:
        job.close()


def test_the_labs_job():
    device = open_device("emulated")
    job = segmentation_job(get_preset("smoke", "emulated", batches=2), device, process=class_map)
    assert job.output_shape == (3, CLASSES, 64, 64)
    assert job.output_dtype == torch.float32
    assert job.output_bytes == 3 * CLASSES * 64 * 64 * 4
    assert job.process is class_map
    assert job.name == SMALL
    assert job.count == 2
    job.close()


def test_the_labs_job_in_a_batch_of_one(tmp_path):
    solid(tmp_path / "only.png", (10, 20, 30))
    size = get_preset("smoke", "emulated", batch=1, image=32, samples=2)
    job = segmentation_job(size, open_device("emulated"), images=tmp_path)
    results = [job.process(i, job.forward(b).cpu()) for i, b in enumerate(job.batches())]
    assert len(results) == 2
    assert len(set(results)) == 1
    job.close()


def test_digest_sees_order_and_content():
    assert digest(["a", "b"]) == digest(["a", "b"])
    others = [["b", "a"], ["a"], ["ab"], ["a", "b", "b"], ["a", "c"], [["a", "b"]], [b"a", b"b"]]
    digests = [digest(results) for results in ([], ["a", "b"], *others)]
    assert len(set(digests)) == len(digests)


@pytest.mark.parametrize(
    "result",
    ["one", None, 1.5, ["same", "same"], {"a": (1, 2)}, np.arange(6.0).reshape(2, 3).T,
     np.arange(10)[::2], torch.arange(6).view(2, 3), torch.arange(10)[2:4]],
    ids=repr,
)  # fmt: skip
def test_digest_does_not_see_the_way_back_from_a_worker(result):
    assert digest([result]) == digest([pickle.loads(pickle.dumps(result))])


@pytest.mark.parametrize("process", [archive, class_map, "archive", "class_map"])
def test_post_processing_is_chosen_by_name_or_function(process):
    size = get_preset("smoke", "emulated", batches=1)
    job = segmentation_job(size, open_device("emulated"), process)
    assert job.process is {"archive": archive, "class_map": class_map}.get(process, process)


def test_an_unknown_post_processing_is_refused():
    size = get_preset("smoke", "emulated", batches=1)
    with pytest.raises(LabError, match="unknown process 'draw': choose archive, class_map"):
        segmentation_job(size, open_device("emulated"), "draw")
