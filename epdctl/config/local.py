"""Settings of `epdctl up`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field, field_validator, model_validator
from pydantic_settings import CliPositionalArg, SettingsConfigDict

from epdctl.config import CommandSettings
from epdctl.config.text import device_name
from epdctl.local.shape import parse_shape


def _checked_shape(text: str) -> str:
    parse_shape(text)
    return text


class UpSettings(CommandSettings):
    """Start a local deployment: the proxy and bundled workers of a shape, registered and ready.

    Ctrl-C takes everything down. The deployment listens on loopback only.

    examples:
      epdctl up 1e1pd --model models/tiny-vlm/qwen2_5_vl
      epdctl up 2e2p2d --model models/tiny-vlm/qwen3_vl --port 9000 --with-store
    """

    model_config = SettingsConfigDict(cli_prog_name="epdctl up")

    shape: CliPositionalArg[Annotated[str, AfterValidator(_checked_shape)]] = Field(
        description="XeYpd or XeYpZd: how many instances of each role, as 1e1pd or 2e1p2d."
    )
    model: str = Field(description="Model folder (or name, where a hub can be reached) for all workers.")
    served_model_name: str | None = Field(
        None, description="Name clients use; the last part of --model unless given."
    )
    port: int = Field(8000, ge=1, le=65535, description="Port of the proxy; workers take free ports.")
    device: str = Field("cpu", description="Device of all workers: cpu, cuda, cuda:N.")
    with_store: bool = Field(
        False, description="Start a Mooncake Store too, which keeps embeddings for all encode workers."
    )
    log_dir: Path = Field(Path(".run"), description="Folder for one log file a process.")
    start_timeout: float = Field(300, gt=0, description="Seconds each process may take to become healthy.")
    stop_grace: float = Field(15, gt=0, description="Seconds for processes to end before they are killed.")

    _device = field_validator("device")(device_name)

    @model_validator(mode="after")
    def _name_from_model(self) -> UpSettings:
        if self.served_model_name is None:
            self.served_model_name = self.model.rstrip("/").rsplit("/", 1)[-1]
        return self
