"""Settings of the bundled workers: what they share, and `epdctl worker encode`.

Rules of this file: a flag is here only if it works; defaults exist once, here.
"""

from __future__ import annotations

from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AliasChoices, BeforeValidator, Field, SecretStr, field_validator
from pydantic_settings import NoDecode

from epdctl.config import CommandSettings
from epdctl.logs import LogFormat, LogLevel

MIB = 1024 * 1024
GIB = 1024 * MIB


def _http_url(value: str | None) -> str | None:
    if value is None:
        return None
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ValueError(f"'{value}' is not an http(s) URL such as http://10.0.0.5:8001")
    return value.rstrip("/")


def _comma_list(value: object) -> object:
    return tuple(v for v in value.split(",") if v) if isinstance(value, str) else value


CommaList = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_comma_list)]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]


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
    threads: int = Field(1, ge=1, description="CPU threads of the engine process.")
    register_url: str | None = Field(
        None,
        validation_alias=AliasChoices("register", "EPDCTL_REGISTER"),
        description="URL of an epdctl proxy to register with; kept alive, withdrawn on exit. The key comes "
        "from ADMIN_API_KEY.",
    )
    admin_api_key: SecretStr | None = Field(
        None, validation_alias="ADMIN_API_KEY", description="Key for --register (environment only)."
    )
    max_body_bytes: int = Field(256 * MIB, ge=1024, description="Largest request body.")
    mooncake_protocol: Literal["tcp", "rdma"] = Field("tcp", description="Transport of Mooncake.")
    mooncake_ports: str | None = Field(
        None,
        pattern=r"^\d+-\d+$",
        description="Ports Mooncake may listen on, A-B, below 32768. Default: Mooncake's own, 15000-17000.",
    )
    shutdown_grace: float = Field(
        30.0, ge=0, description="Seconds that accepted requests have to finish after SIGTERM."
    )
    log_format: LogFormat = Field("json", description="Log format, on stderr.")
    log_level: LogLevel = Field("info", description="Lowest level that is logged.")

    _urls = field_validator("advertise_url", "register_url")(_http_url)

    @property
    def model_name(self) -> str:
        """The name that requests must use."""
        return self.served_model_name or self.model
