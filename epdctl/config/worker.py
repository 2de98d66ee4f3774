"""Settings of the bundled workers: what they share, and those of `epdctl worker encode`.

Rules of this file: a flag is here only if it works; defaults exist once, here.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, SecretStr, field_validator, model_validator
from pydantic_settings import CliSuppress, NoDecode

from epdctl.config import CommandSettings, child_environment
from epdctl.config.text import device_name, split_list
from epdctl.hosts import ascii_form, is_host
from epdctl.logs import LogFormat, LogLevel
from epdctl.worker.transfer.environment import mooncake_environment, parse_ports

MIB = 1024 * 1024
GIB = 1024 * MIB


def _http_url(value: str | None) -> str | None:
    if value is None:
        return None
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ValueError(f"'{value}' is not an http(s) URL such as http://10.0.0.5:8001")
    if not is_host(parts.hostname):
        raise ValueError(f"the host of '{value}' is no name and no IP address")
    return value.rstrip("/")


def _comma_list(value: object) -> object:
    if not isinstance(value, str):
        return value
    pieces = split_list(value)
    if not pieces:
        raise ValueError(f"'{value}' names nothing: give names, separated by commas, or leave it out")
    return pieces


CommaList = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_comma_list)]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]


def variable_EPDCTL_REGISTER() -> str | None:  # noqa: N802 - `--help` shows this name as the default
    """Return the variable behind `--register`, whose field cannot have that name (pydantic's own)."""
    return os.environ.get("EPDCTL_REGISTER")


class WorkerSettings(CommandSettings):
    """Settings that every bundled worker has."""

    model: str = Field(description="Folder of the checkpoint, or its name on the model hub.")
    served_model_name: str | None = Field(
        None, description="Name that requests must use. Default: the value of --model."
    )
    host: str = Field("0.0.0.0", description="Address to listen on.")  # noqa: S104
    port: int = Field(8001, ge=0, le=65535, description="Port to listen on; 0 picks a free one.")
    advertise_url: str | None = Field(
        None,
        description="URL under which others reach this worker; what is registered. Default: --host and "
        "--port, or the route towards the registry when --host is a wildcard.",
    )
    device: str = Field("cpu", description="Device of the model, such as cpu or cuda:0.")
    dtype: Dtype = Field("auto", description="Data type of the model; auto is the checkpoint's own.")
    threads: int = Field(1, ge=1, le=1024, description="CPU threads of the engine process.")
    register_url: str | None = Field(
        default_factory=variable_EPDCTL_REGISTER,
        validate_default=True,
        validation_alias="register",
        description="URL of an epdctl proxy to register with; kept alive, withdrawn on exit. The key comes "
        "from the variable ADMIN_API_KEY.",
    )
    admin_api_key: CliSuppress[SecretStr | None] = Field(
        None, validation_alias="ADMIN_API_KEY", description="Key that --register sends in X-API-Key."
    )
    max_body_bytes: int = Field(256 * MIB, ge=1024, description="Largest request body.")
    mooncake_protocol: Literal["tcp", "rdma"] = Field("tcp", description="Transport of Mooncake.")
    mooncake_devices: CommaList = Field(
        (),
        description="Comma-separated RDMA devices that Mooncake may use, such as mlx5_0,mlx5_1; only with "
        "--mooncake-protocol rdma. Default: those that Mooncake finds.",
    )
    mooncake_ports: str | None = Field(
        None,
        description="Ports Mooncake may listen on, A-B, below 32768. Default: Mooncake's own, 15000-17000.",
    )
    shutdown_grace: float = Field(
        30.0, ge=0, description="Seconds that accepted requests have to finish after SIGTERM."
    )
    log_format: LogFormat = Field("json", description="Log format, on stderr.")
    log_level: LogLevel = Field("info", description="Lowest level that is logged.")

    @field_validator("mooncake_ports")
    @classmethod
    def _ports(cls, value: str | None) -> str | None:
        if value is not None:
            parse_ports(value)
        return value

    _urls = field_validator("advertise_url", "register_url")(_http_url)
    _device = field_validator("device")(device_name)

    @model_validator(mode="after")
    def _devices(self) -> Self:
        if self.mooncake_devices and self.mooncake_protocol != "rdma":
            raise ValueError("--mooncake-devices are those of --mooncake-protocol rdma")
        return self

    @property
    def model_name(self) -> str:
        """The name that requests must use."""
        return self.served_model_name or self.model

    @property
    def mooncake_port_range(self) -> tuple[int, int] | None:
        """The two ends of `--mooncake-ports`, or None."""
        return parse_ports(self.mooncake_ports) if self.mooncake_ports else None

    def engine_environment(self, host: str = "") -> dict[str, str]:
        """Return the environment of an engine process that is reached under `host`.

        It is ours, with what Mooncake must find before it is loaded.
        """
        given = child_environment()
        return given | mooncake_environment(
            given, protocol=self.mooncake_protocol, host=host, ports=self.mooncake_port_range
        )


class EncodeSettings(WorkerSettings):
    """Run an encode worker: the vision tower of a model, without its language model.

    Pictures and videos come in as OpenAI chat requests, embeddings go to EC consumers over Mooncake, as from
    a vLLM encoder (ECMooncakeConnector), or into a folder that they share (ECExampleConnector).

    examples:
      epdctl worker encode --model Qwen/Qwen2.5-VL-3B-Instruct --port 8001
      epdctl worker encode --model models/tiny-vlm/qwen2_5_vl --host 127.0.0.1 --register http://127.0.0.1:8000
      epdctl worker encode --model ./m --ec-connector shared-filesystem --shared-storage-path /mnt/ec
      epdctl worker encode --model ./m --allowed-local-media-path /data/images --max-batch-items 32
    """

    data_parallel_size: int = Field(
        1,
        ge=1,
        le=64,
        description="Engines, each a process with a cache of its own: one for each device of the kind that "
        "--device names (cuda: cuda:0 and up), or all on the CPU. They share this worker's URL.",
    )
    ec_connector: Literal["mooncake", "shared-filesystem"] = Field(
        "mooncake",
        description="How embeddings reach consumers: pushed over Mooncake (ECMooncakeConnector), or as files "
        "in --shared-storage-path (ECExampleConnector), which needs no Mooncake.",
    )
    shared_storage_path: Path | None = Field(
        None, description="Folder for --ec-connector shared-filesystem: consumers' shared_storage_path."
    )
    reply_after: Literal["push", "encode"] = Field(
        "push", description="Answer when the consumer has the embeddings, or as soon as they are encoded."
    )
    compile: bool = Field(
        False,
        description="Compile the tower with torch.compile. A worker that cannot does not start; compiling "
        "takes from half a minute to some minutes.",
    )
    arena: Literal["host", "device"] = Field(
        "host",
        description="Where --cache-bytes lie: in host memory, or in that of --device, a GPU; this takes a "
        "Mooncake with CUDA (extras cuda12, cuda13).",
    )
    cache_bytes: int = Field(
        256 * MIB,
        ge=MIB,
        description="Embedding cache of each engine: the memory that Mooncake reads from.",
    )
    cache_dram_bytes: int = Field(
        0, ge=0, description="Memory of each engine for embeddings that left --cache-bytes; 0 keeps none."
    )
    mooncake_store: str | None = Field(
        None,
        description="HOST:PORT of a mooncake_master: a store of embeddings that encode workers share. "
        "Default: none.",
    )
    mooncake_store_segment_bytes: int = Field(
        256 * MIB, ge=0, description="Memory that each engine lends to the store; 0 only uses that of others."
    )
    mooncake_store_buffer_bytes: int = Field(
        64 * MIB, ge=MIB, description="Memory to exchange embeddings with the store; larger ones stay out."
    )
    mooncake_store_timeout: float = Field(
        0.2, gt=0, description="Seconds to wait for the store before the tower runs instead."
    )
    max_batch_tokens: int = Field(8192, ge=1, description="Most embedding rows in one forward.")
    max_batch_items: int = Field(16, ge=1, description="Most items in one forward.")
    max_item_tokens: int = Field(16384, ge=1, description="Most embedding rows of one item.")
    max_items: int = Field(64, ge=1, description="Most items in one request.")
    queue_items: int = Field(512, ge=1, description="Most items accepted at a time; beyond it 429.")
    transfer_timeout: float = Field(
        8.0, gt=0, description="Seconds until a push that makes no end fails, or an item without cache space."
    )
    media_threads: int = Field(2, ge=1, le=1024, description="Threads that decode and resize media.")
    media_timeout: float = Field(10.0, gt=0, description="Seconds to fetch one item.")
    media_redirects: int = Field(3, ge=0, description="Redirects to follow for one item.")
    max_media_bytes: int = Field(64 * MIB, ge=1, description="Largest media file.")
    media_memory_bytes: int = Field(
        GIB,
        ge=1,
        description="Most bytes of fetched media that all requests hold together: a request that is larger "
        "by itself gets 400, one that finds no room because of others 429.",
    )
    max_image_pixels: int = Field(
        89_478_485, ge=1, description="Most pixels of an image or of a video's frame, width x height."
    )
    max_video_frames: int = Field(768, ge=1, description="Most frames that are taken of one video.")
    max_video_pixels: int = Field(
        256 * MIB, ge=1, description="Most pixels of the frames taken of one video, together (3 bytes each)."
    )
    video_timeout: float = Field(30.0, gt=0, description="Seconds to decode one video.")
    allowed_media_domains: CommaList = Field(
        (),
        description="Comma-separated hosts that media may be fetched from, which may then be private ones. "
        "Default: any host with public addresses only.",
    )
    allowed_local_media_path: Path | None = Field(
        None, description="Folder that file:// URLs may name files in. Default: none may."
    )

    @field_validator("allowed_media_domains")
    @classmethod
    def _hosts(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for host in value:
            if not is_host(ascii_form(host)):
                raise ValueError(
                    f"'{host}' is no host: give names or addresses, such as images.example.com or 10.0.0.5, "
                    "without scheme, port, path or *"
                )
        return value

    @field_validator("mooncake_store")
    @classmethod
    def _store(cls, value: str | None) -> str | None:
        if value is not None:
            host, _, port = value.rpartition(":")
            if not is_host(host.strip("[]")) or not port.isdecimal() or not 0 < int(port) < 65536:
                raise ValueError(f"'{value}' is not HOST:PORT, such as 10.0.0.9:50051")
        return value

    @model_validator(mode="after")
    def _check(self) -> EncodeSettings:
        if self.max_items > self.queue_items:
            raise ValueError("--queue-items must be at least --max-items")
        if self.max_media_bytes > self.media_memory_bytes:
            raise ValueError("--media-memory-bytes must be at least --max-media-bytes")
        if self.data_parallel_size > 1 and ":" in self.device:
            raise ValueError(
                f"--device {self.device} is one device: with --data-parallel-size name its kind, such as cuda"
            )
        self._check_connector()
        self._check_mooncake()
        self._check_arena()
        path = self.allowed_local_media_path
        if path is not None and not path.is_dir():
            raise ValueError(f"--allowed-local-media-path {path}: no such folder")
        return self

    def _check_connector(self) -> None:
        path = self.shared_storage_path
        if (self.ec_connector == "shared-filesystem") is not (path is not None):
            raise ValueError("--ec-connector shared-filesystem and --shared-storage-path need each other")
        if path is not None and not path.is_dir():
            raise ValueError(f"--shared-storage-path {path}: no such folder")
        if path is not None and self.reply_after == "encode":
            # A consumer of vLLM that is asked for an embedding that is not in the folder yet ends itself.
            raise ValueError("--reply-after encode does not go with --ec-connector shared-filesystem")

    def _check_mooncake(self) -> None:
        if self.mooncake_store is not None:
            return
        self.refuse_idle(
            "mooncake_store_segment_bytes",
            "mooncake_store_buffer_bytes",
            "mooncake_store_timeout",
            why="without --mooncake-store",
        )
        if self.ec_connector == "shared-filesystem":
            why = "with --ec-connector shared-filesystem and no --mooncake-store"
            idle = ("mooncake_protocol", "mooncake_devices", "mooncake_ports")
            # Language workers read these variables too.
            self.refuse_idle(*idle, why=why, variables_count=False)

    def _check_arena(self) -> None:
        if self.arena == "host":
            return
        if self.device.partition(":")[0] == "cpu":
            raise ValueError(f"--arena device is memory of a GPU: give one by --device, not {self.device}")
        if self.ec_connector == "shared-filesystem":
            raise ValueError(
                "--arena device does not go with --ec-connector shared-filesystem: files are written from"
                " host memory (--arena host)"
            )

    @property
    def engine_devices(self) -> tuple[str, ...]:
        """The device of each engine."""
        size = self.data_parallel_size
        if size == 1 or self.device == "cpu":
            return (self.device,) * size
        return tuple(f"{self.device}:{number}" for number in range(size))
