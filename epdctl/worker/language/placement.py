"""Where the images and videos of a request sit in its prompt, and which push brings each of them.

Rules of this file: pure; ids in, ids out.
"""

from __future__ import annotations

from collections.abc import Sequence

from epdctl.domain import Modality
from epdctl.errors import InvalidRequest
from epdctl.worker.language.content import ImagePart
from epdctl.worker.language.messages import PromptImage
from epdctl.worker.language.positions import image_rows
from epdctl.worker.language.request import EcItem
from epdctl.worker.language.spec import ModelSpec


def place_images(
    token_ids: Sequence[int],
    images: Sequence[ImagePart],
    items: Sequence[EcItem],
    *,
    spec: ModelSpec,
) -> tuple[list[int], tuple[PromptImage, ...]]:
    """Return the prompt with one placeholder token per embedding row, and the images in it.

    Raises:
        InvalidRequest: the prompt has other placeholders than the request has images and videos.
    """
    tokens = {spec.placeholder(modality): modality for modality in (Modality.IMAGE, Modality.VIDEO)}
    places = [i for i, token in enumerate(token_ids) if token in tokens]
    if [tokens[token_ids[i]] for i in places] != [image.modality for image in images]:
        raise InvalidRequest(
            f"the prompt has {len(places)} placeholders for {len(images)} images and videos: a text must not"
            " contain the model's placeholders, and the chat template must place every item in its order",
            param="messages",
        )
    expanded: list[int] = []
    placed: list[PromptImage] = []
    done = 0
    for index, (place, image) in enumerate(zip(places, images, strict=True)):
        expanded.extend(token_ids[done:place])
        rows = image_rows(image.grid, spec.merge)
        mm_hash, transfer_id = match_item(index, image.uuid, items, len(images))
        placed.append(
            PromptImage(
                mm_hash=mm_hash,
                transfer_id=transfer_id,
                offset=len(expanded),
                rows=rows,
                grid=image.grid,
                modality=image.modality,
            )
        )
        expanded.extend([token_ids[place]] * rows)
        done = place + 1
    expanded.extend(token_ids[done:])
    return expanded, tuple(placed)


def match_item(index: int, uuid: str, items: Sequence[EcItem], images: int) -> tuple[str, str | None]:
    """Return hash and transfer id of image `index` of `images`, as vLLM 0.33.0's consumer resolves them.

    Entry `index` if it names no other hash, else the first entry with the image's hash. One addition: when
    there is exactly an entry for each image and none has this hash, the entry's own hash counts, since the
    encoder may have hashed options into it. Without any entry the hash alone must do.
    """
    own = items[index] if index < len(items) else None
    if own is not None and own.transfer_id is not None and own.mm_hash in (None, uuid):
        return uuid, own.transfer_id
    for item in items:
        if item.mm_hash == uuid and item.transfer_id is not None:
            return uuid, item.transfer_id
    if own is not None and own.mm_hash is not None and len(items) == images:
        return own.mm_hash, own.transfer_id
    return uuid, None
