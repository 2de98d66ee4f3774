"""Reading encode requests: what is taken, what is ignored, what is refused and how that reads."""

from __future__ import annotations

from typing import Any

import pytest

from epdctl.domain import Modality
from epdctl.errors import EpdError, InvalidRequest, UnknownModel, UnsupportedMedia
from epdctl.worker.encode.frames import Sampling
from epdctl.worker.encode.keys import NamedTransfer
from epdctl.worker.encode.options import ItemOptions, VideoOptions, parse_options, parse_video_options
from epdctl.worker.encode.request import EncodeRequest, MediaPart, parse_encode_request

pytestmark = pytest.mark.unit

URL = "data:image/png;base64,AAAA"
IMAGE = {"type": "image_url", "image_url": {"url": URL}}


def read(*parts: Any, **fields: Any) -> EncodeRequest:
    """Return the request of one user message with `parts`."""
    body = {"model": "m", "messages": [{"role": "user", "content": list(parts)}], **fields}
    return parse_encode_request(body, model="m", max_items=3)


def test_captured_request_of_the_reference_proxy() -> None:
    """The encode request that vLLM's proxy sends is understood field by field."""
    transfer = {"consumer_zmq": "tcp://127.0.0.1:27119", "ec_items": [{"transfer_id": "t"}]}

    request = read({**IMAGE, "uuid": "u"}, stream=False, ec_transfer_params=transfer)

    assert request == EncodeRequest(
        parts=(MediaPart(index=0, param="messages[0].content[0]", url=URL, uuid="u"),),
        options={Modality.IMAGE: ItemOptions()},
        consumer_zmq="tcp://127.0.0.1:27119",
        named=(NamedTransfer(transfer_id="t"),),
    )


@pytest.mark.parametrize(
    "part",
    [
        IMAGE,
        {"type": "image_url", "image_url": URL},
        {"type": "input_image", "image_url": URL},
        {"type": "image_url", "image_url": {"url": URL, "detail": "low"}},
    ],
)
def test_spellings_of_a_picture(part: dict[str, Any]) -> None:
    """The ways to write a picture that vLLM takes mean the same."""
    assert [one.url for one in read(part).parts] == [URL]


def test_pictures_are_numbered_across_messages_and_text_is_passed_over() -> None:
    """Only pictures count; their places in the body are kept for error messages."""
    body = {
        "messages": [
            {"role": "system", "content": "text"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, IMAGE]},
            {"role": "assistant", "content": None},
            {"role": "user", "content": [IMAGE]},
        ]
    }

    request = parse_encode_request(body, model="m", max_items=3)

    assert [(part.index, part.param) for part in request.parts] == [
        (0, "messages[1].content[1]"),
        (1, "messages[3].content[0]"),
    ]


REFUSED: list[tuple[str, dict[str, Any], type[EpdError], str | None]] = [
    ("no messages", {"messages": None}, InvalidRequest, "messages"),
    ("empty messages", {"messages": []}, InvalidRequest, "messages"),
    ("message is no object", {"messages": [1]}, InvalidRequest, "messages[0]"),
    ("content is a number", {"messages": [{"content": 5}]}, InvalidRequest, "messages[0].content"),
    ("part is a number", {"messages": [{"content": [5]}]}, InvalidRequest, "messages[0].content[0]"),
    ("part has no type", {"messages": [{"content": [{}]}]}, InvalidRequest, "messages[0].content[0]"),
    ("another model", {"model": "x"}, UnknownModel, "model"),
    ("model is a number", {"model": 5}, InvalidRequest, "model"),
    ("stream", {"stream": True}, InvalidRequest, "stream"),
    ("too many", {"messages": [{"content": [IMAGE] * 4}]}, InvalidRequest, "messages"),
    ("params no object", {"ec_transfer_params": []}, InvalidRequest, "ec_transfer_params"),
    (
        "consumer address",
        {"ec_transfer_params": {"consumer_zmq": "ipc:///tmp/x"}},
        InvalidRequest,
        "ec_transfer_params.consumer_zmq",
    ),
    (
        "consumer's host is none",
        {"ec_transfer_params": {"consumer_zmq": "tcp://a..b:5"}},
        InvalidRequest,
        "ec_transfer_params.consumer_zmq",
    ),
    (
        "consumer is a number",
        {"ec_transfer_params": {"consumer_zmq": 1}},
        InvalidRequest,
        "ec_transfer_params.consumer_zmq",
    ),
    (
        "ec_items is a number",
        {"ec_transfer_params": {"ec_items": 1}},
        InvalidRequest,
        "ec_transfer_params.ec_items",
    ),
    (
        "ec_items of text",
        {"ec_transfer_params": {"ec_items": ["x"]}},
        InvalidRequest,
        "ec_transfer_params.ec_items[0]",
    ),
    (
        "the same transfer id twice",
        {"ec_transfer_params": {"ec_items": [{"transfer_id": t} for t in ("a", "b", "a")]}},
        InvalidRequest,
        "ec_transfer_params.ec_items[2].transfer_id",
    ),
    *[
        (
            f"transfer id {text!r}"[:30],
            {"ec_transfer_params": {"ec_items": [{"transfer_id": "a"}, {"transfer_id": text}]}},
            InvalidRequest,
            "ec_transfer_params.ec_items[1].transfer_id",
        )
        for text in ("", "a b", "a/b", "a\n", "\na", "ä", "a\0", "a" * 1025)
    ],
    (
        "transfer id is a number",
        {"ec_transfer_params": {"ec_items": [{"transfer_id": 1}]}},
        InvalidRequest,
        "ec_transfer_params.ec_items[0].transfer_id",
    ),
]


def test_the_limit_of_items_names_its_setting() -> None:
    """One item too many is told with the number and the flag."""
    body = {"messages": [{"role": "user", "content": [IMAGE] * 4}]}

    with pytest.raises(InvalidRequest, match=r"at most 3 .* \(--max-items\)"):
        parse_encode_request(body, model="m", max_items=3)


@pytest.mark.parametrize(
    ("change", "kind", "param"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED]
)
def test_bad_field_is_named(change: dict[str, Any], kind: type[EpdError], param: str) -> None:
    """A field of the wrong kind is refused, and the answer names it."""
    body = {"messages": [{"role": "user", "content": [IMAGE]}], **change}

    with pytest.raises(kind) as failure:
        parse_encode_request(body, model="m", max_items=3)

    assert failure.value.param == param


@pytest.mark.parametrize(
    ("part", "kind"),
    [
        ({"type": "audio_url", "audio_url": {"url": URL}}, UnsupportedMedia),
        ({"type": "video_url", "uuid": "u"}, UnsupportedMedia),
        ({"type": "video_url", "video_url": {"url": 1}}, InvalidRequest),
        ({"type": "input_audio", "input_audio": {"data": "AAAA"}}, UnsupportedMedia),
        ({"type": "image_embeds", "image_embeds": {}}, UnsupportedMedia),
        ({"type": "image_url", "uuid": "u"}, UnsupportedMedia),
        ({"type": "image_url", "image_url": None, "uuid": "u"}, UnsupportedMedia),
        ({"type": "image_url", "image_url": {}}, InvalidRequest),
        ({"type": "image_url", "image_url": {"url": 1}}, InvalidRequest),
        ({**IMAGE, "uuid": ""}, InvalidRequest),
        ({**IMAGE, "uuid": 5}, InvalidRequest),
        ({**IMAGE, "uuid": "x" * 1025}, InvalidRequest),
        ({**IMAGE, "uuid": "ec_items"}, InvalidRequest),
        ({**IMAGE, "uuid": "consumer_zmq"}, InvalidRequest),
    ],
)
def test_part_that_cannot_be_encoded_is_refused(part: dict[str, Any], kind: type[EpdError]) -> None:
    """Other media, a name without a picture, and names that would overwrite a field are refused."""
    with pytest.raises(kind) as failure:
        read(IMAGE, part)

    assert (failure.value.param or "").startswith("messages[0].content[1]")


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, ItemOptions()),
        ({"mm_processor_kwargs": None, "media_io_kwargs": None}, ItemOptions()),
        ({"mm_processor_kwargs": {"videos_kwargs": {"fps": 2}}}, ItemOptions()),
        ({"media_io_kwargs": {"video": {"num_frames": 4}, "audio": {}}}, ItemOptions()),
        (
            {"mm_processor_kwargs": {"min_pixels": 4, "max_pixels": 9}},
            ItemOptions(min_pixels=4, max_pixels=9),
        ),
        ({"mm_processor_kwargs": {"images_kwargs": {"max_pixels": 9}}}, ItemOptions(max_pixels=9)),
        (
            {"mm_processor_kwargs": {"size": {"shortest_edge": 4, "longest_edge": 9}}},
            ItemOptions(min_pixels=4, max_pixels=9),
        ),
        (
            {"media_io_kwargs": {"image": {"image_mode": "RGB", "rgba_background_color": [1, 2, 3]}}},
            ItemOptions(background=(1, 2, 3)),
        ),
    ],
)
def test_options_that_are_served(body: dict[str, Any], expected: ItemOptions) -> None:
    """The spellings of one option mean the same."""
    assert parse_options(body) == expected


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"mm_processor_kwargs": 5}, "mm_processor_kwargs"),
        ({"mm_processor_kwargs": {"fps": 5}}, "mm_processor_kwargs.fps"),
        ({"mm_processor_kwargs": {"max_pixels": "9"}}, "mm_processor_kwargs.max_pixels"),
        ({"mm_processor_kwargs": {"max_pixels": True}}, "mm_processor_kwargs.max_pixels"),
        ({"mm_processor_kwargs": {"max_pixels": 0}}, "mm_processor_kwargs.max_pixels"),
        ({"mm_processor_kwargs": {"size": {"height": 3}}}, "mm_processor_kwargs.size.height"),
        ({"mm_processor_kwargs": {"min_pixels": 9, "max_pixels": 4}}, "mm_processor_kwargs"),
        ({"media_io_kwargs": {"smell": {}}}, "media_io_kwargs.smell"),
        ({"media_io_kwargs": {"image": {"x": 1}}}, "media_io_kwargs.image.x"),
        ({"media_io_kwargs": {"image": {"image_mode": "L"}}}, "media_io_kwargs.image.image_mode"),
        (
            {"media_io_kwargs": {"image": {"rgba_background_color": [0, 0, 256]}}},
            "media_io_kwargs.image.rgba_background_color",
        ),
    ],
)
def test_option_that_is_not_served_is_named(body: dict[str, Any], param: str) -> None:
    """An option is served or refused by name; none is silently ignored."""
    with pytest.raises(InvalidRequest) as failure:
        parse_options(body)

    assert failure.value.param == param


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, VideoOptions()),
        ({"mm_processor_kwargs": {"images_kwargs": {"max_pixels": 9}}}, VideoOptions()),
        ({"mm_processor_kwargs": {"videos_kwargs": {"max_pixels": 9}}}, VideoOptions(max_pixels=9)),
        ({"mm_processor_kwargs": {"min_pixels": 4, "do_sample_frames": False}}, VideoOptions(min_pixels=4)),
        ({"media_io_kwargs": {"image": {"image_mode": "RGB"}}}, VideoOptions()),
        ({"media_io_kwargs": {"video": {"num_frames": -1, "fps": -1}}}, VideoOptions(num_frames=0)),
        ({"media_io_kwargs": {"video": {"fps": 3, "max_frames": 8}}}, VideoOptions(fps=3.0, max_frames=8)),
        (
            {"media_io_kwargs": {"video": {"num_frames": 4, "video_backend": "opencv"}}},
            VideoOptions(num_frames=4, sampling=Sampling.UNIFORM),
        ),
    ],
)
def test_options_of_videos(body: dict[str, Any], expected: VideoOptions) -> None:
    """Pixel bounds at the top or under videos_kwargs, and the choice of frames."""
    assert parse_video_options(body) == expected


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"mm_processor_kwargs": {"fps": 5}}, "mm_processor_kwargs.fps"),
        ({"mm_processor_kwargs": {"do_sample_frames": True}}, "mm_processor_kwargs.do_sample_frames"),
        ({"media_io_kwargs": {"video": {"num_frames": 0}}}, "media_io_kwargs.video.num_frames"),
        ({"media_io_kwargs": {"video": {"num_frames": 2.5}}}, "media_io_kwargs.video.num_frames"),
        ({"media_io_kwargs": {"video": {"min_frames": 9, "max_frames": 4}}}, "media_io_kwargs.video"),
        ({"media_io_kwargs": {"video": {"fps": "2"}}}, "media_io_kwargs.video.fps"),
        ({"media_io_kwargs": {"video": {"fps": 0}}}, "media_io_kwargs.video.fps"),
        ({"media_io_kwargs": {"video": {"video_backend": "x"}}}, "media_io_kwargs.video.video_backend"),
        ({"media_io_kwargs": {"video": {"backend": "torchcodec"}}}, "media_io_kwargs.video.backend"),
        ({"media_io_kwargs": {"video": 5}}, "media_io_kwargs.video"),
    ],
)
def test_video_option_that_is_not_served_is_named(body: dict[str, Any], param: str) -> None:
    """An option of videos is served or refused by name."""
    with pytest.raises(InvalidRequest) as failure:
        parse_video_options(body)

    assert failure.value.param == param


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"mm_processor_kwargs": {"max_pixels": 2**31 + 1}}, "whole number of pixels from 1 to 2147483648"),
        (
            {"mm_processor_kwargs": {"size": {"longest_edge": 0}}},
            "whole number of pixels from 1 to 2147483648",
        ),
        (
            {"media_io_kwargs": {"video": {"num_frames": 2**20 + 1}}},
            "whole number of frames from 1 to 1048576, or -1 for all$",
        ),
        ({"media_io_kwargs": {"video": {"num_frames": 0}}}, "from 1 to 1048576, or -1 for all$"),
        ({"media_io_kwargs": {"video": {"max_frames": 0}}}, "whole number of frames from 1 to 1048576$"),
        ({"media_io_kwargs": {"video": {"min_frames": -1}}}, "whole number of frames from 1 to 1048576$"),
        (
            {"media_io_kwargs": {"video": {"fps": 2**21}}},
            "above 0 and at most 1048576, or -1 as if not given",
        ),
        ({"media_io_kwargs": {"video": {"fps": 0}}}, "above 0 and at most 1048576, or -1 as if not given"),
    ],
)
def test_both_ends_of_a_range_are_named(body: dict[str, Any], text: str) -> None:
    """Whoever gives too much is not told that it must be more."""
    with pytest.raises(InvalidRequest, match=text):
        parse_video_options(body)


def test_pictures_and_videos_of_one_request() -> None:
    """Parts keep their order and their kind, and each kind has its own options."""
    request = read(IMAGE, {"type": "video_url", "video_url": {"url": URL}}, IMAGE)

    kinds = [part.modality for part in request.parts]
    assert kinds == [Modality.IMAGE, Modality.VIDEO, Modality.IMAGE]
    assert request.options == {Modality.IMAGE: ItemOptions(), Modality.VIDEO: VideoOptions()}
