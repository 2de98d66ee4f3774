"""The main job, watched: one picture from the proxy to the right answer.

Starts a proxy, an encode worker and a prefill_decode worker as real processes, registers them, sends one
picture with a question, and shows where the picture and its embedding went. The answer is the last line of
stdout, and all there is on stdout; progress goes to stderr.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import mimetypes
import re
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import aiohttp

from epdctl.config import EXIT_FAILED, EXIT_OK, child_environment
from epdctl.local.deployment import Deployment, Say, deploy, free_ports
from epdctl.local.plan import WorkerOptions
from epdctl.local.shape import parse_shape
from epdctl.local.up import progress, run_until_signal
from epdctl.wire import encode_json, parse_object

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "models" / "tiny-vlm" / "qwen2_5_vl"
PICTURE = ROOT / "examples" / "red.png"
QUESTION = "What is the color of the image?"
REQUEST_TIMEOUT_S = 120.0
EXIT_INTERRUPTED = 130


class DemoFailed(Exception):
    """The request did not end well; the message says how."""


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(
        prog="scripts/demo",
        description="Send a picture through proxy, encode and prefill_decode worker; print the answer.",
        epilog="examples:\n"
        "  scripts/demo\n"
        "  scripts/demo --image examples/blue.png\n"
        "  scripts/demo --image my.jpg --question 'Which color?' --keep\n\n"
        "The tiny model knows twelve colors and no more: see models/tiny-vlm/README.md.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--image", type=Path, default=PICTURE, help="the picture to ask about (default: a red one)"
    )
    parser.add_argument("--question", default=QUESTION, help=f"what to ask (default: {QUESTION!r})")
    parser.add_argument(
        "--model", default=str(MODEL), help="model folder (default: the tiny one of this repository)"
    )
    parser.add_argument("--port", type=int, default=0, help="port of the proxy (default: a free one)")
    parser.add_argument(
        "--log-dir", type=Path, default=ROOT / ".run" / "demo", help="folder for the processes' logs"
    )
    parser.add_argument("--keep", action="store_true", help="stay up until Ctrl-C and print the curl lines")
    arguments = parser.parse_args(words)
    if not arguments.image.is_file():
        parser.error(f"--image: there is no file {arguments.image}")
    return arguments


def data_url(picture: Path) -> str:
    """Return `picture` as a data URL."""
    kind = mimetypes.guess_type(picture.name)[0] or "application/octet-stream"
    return f"data:{kind};base64,{base64.b64encode(picture.read_bytes()).decode()}"


def chat_body(model: str, question: str, image_url: str) -> bytes:
    """Return a streaming chat request with one picture and one question."""
    content = [{"type": "image_url", "image_url": {"url": image_url}}, {"type": "text", "text": question}]
    return encode_json(
        {
            "model": model,
            "messages": [{"role": "user", "content": content}],
            "temperature": 0,
            "max_tokens": 32,
            "stream": True,
        }
    )


async def stream_answer(session: aiohttp.ClientSession, url: str, body: bytes, say: Say) -> str:
    """Send `body` to the proxy and return the streamed text; raise DemoFailed on any error."""
    headers = {"Content-Type": "application/json"}
    pieces: list[str] = []
    finished = False
    async with session.post(f"{url}/v1/chat/completions", data=body, headers=headers) as answer:
        if answer.status != 200:
            raise DemoFailed(f"the proxy answered {answer.status}: {await answer.text()}")
        async for line in answer.content:
            if not line.startswith(b"data: "):
                continue
            payload = line[len(b"data: ") :].strip()
            if payload == b"[DONE]":
                finished = True
                break
            event = parse_object(payload)
            if "error" in event:
                raise DemoFailed(f"the stream ended with an error: {event['error']}")
            piece = "".join(c["delta"].get("content") or "" for c in event["choices"])
            if piece:
                say(f"proxy: streamed {piece!r}")
                pieces.append(piece)
    if not finished:
        raise DemoFailed("the stream ended without [DONE]")
    return "".join(pieces)


async def metric(session: aiohttp.ClientSession, url: str, name: str, **labels: str) -> float:
    """Return the sum of metric `name` at `url`/metrics over the series that carry `labels`."""
    async with session.get(f"{url}/metrics") as answer:
        text = await answer.text()
    total = 0.0
    for match in re.finditer(rf"^{name}(?:\{{(.*)\}})? (\S+)$", text, re.MULTILINE):
        if all(f'{key}="{value}"' in (match[1] or "") for key, value in labels.items()):
            total += float(match[2])
    return total


async def show_transfer(session: aiohttp.ClientSession, deployment: Deployment, say: Say) -> None:
    """Say how many embedding bytes each worker counted."""
    for child in deployment.children:
        if child.plan.registration is None:
            continue
        moved = await metric(session, child.plan.url, "epdctl_ec_bytes_total")
        count = await metric(session, child.plan.url, "epdctl_ec_transfers_total")
        say(f"{child.plan.name}: {count:.0f} embedding transfer, {moved:.0f} bytes over Mooncake")


def keep_lines(deployment: Deployment, model: str, picture: Path, question: str) -> str:
    """Return the curl lines that use the running deployment."""
    key = shlex.quote(f"X-API-Key: {deployment.admin_key}")
    marker = "PICTURE"
    before, after = chat_body(model, question, f"data:image/png;base64,{marker}").decode().split(marker)
    file = shlex.quote(str(picture))
    # Piped, since a picture can be longer than one argument of a command may be.
    body = f"{{ printf %s {shlex.quote(before)}; base64 -w0 {file}; echo {shlex.quote(after)}; }}"
    chat = f"{deployment.url}/v1/chat/completions"
    return (
        f"  curl {deployment.url}/instances\n"
        f"  curl '{deployment.url}/instances?view=detail'\n"
        f"  {body} | curl -N {chat} -H 'Content-Type: application/json' -d @-\n"
        f"  curl -X DELETE -H {key} '{deployment.url}/instances?url=URL'\n"
    )


async def demo(arguments: argparse.Namespace, say: Say) -> int:
    """Run the demo; return the exit code."""
    name = Path(arguments.model).name
    async with deploy(
        parse_shape("1e1pd"),
        WorkerOptions(model=arguments.model, served_model_name=name, device="cpu"),
        proxy_port=arguments.port or free_ports(1)[0],
        log_dir=arguments.log_dir,
        environment=child_environment(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false"),
        start_timeout_s=300,
        stop_grace_s=15,
        say=say,
    ) as deployment:
        limits = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=limits) as session:
            say(f"proxy: sending {arguments.image} and {arguments.question!r}")
            body = chat_body(name, arguments.question, data_url(arguments.image))
            answer = await stream_answer(session, deployment.url, body, say)
            await show_transfer(session, deployment, say)
        print(answer, flush=True)
        if arguments.keep:
            say(f"staying up at {deployment.url}, Ctrl-C stops it:")
            sys.stderr.write(keep_lines(deployment, name, arguments.image, arguments.question))
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
    return EXIT_OK


def main() -> int:
    """Entry of scripts/demo."""
    arguments = parse_arguments()
    say = progress(time.monotonic())
    try:
        return asyncio.run(run_until_signal(demo(arguments, say), say, when_signalled=EXIT_INTERRUPTED))
    except (DemoFailed, aiohttp.ClientError, TimeoutError) as failure:
        say(f"failed: {failure or type(failure).__name__}; logs are in {arguments.log_dir}")
        return EXIT_FAILED


if __name__ == "__main__":
    raise SystemExit(main())
