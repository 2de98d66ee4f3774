"""Settings of `epdctl instances …`, the commands that talk to a running proxy.

Rules of this file: one class a command; what they share is in `ProxySettings`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, model_validator
from pydantic_settings import CliPositionalArg, CliSuppress, SettingsConfigDict

from epdctl.config import CommandSettings
from epdctl.config.text import checked, split_list, split_pairs
from epdctl.registry.addresses import normalise_url


def _instance_url(text: str) -> str:
    return checked("the instance", lambda: normalise_url(text))


def _proxy_url(text: str) -> str:
    return checked("the proxy", lambda: normalise_url(text))


Instance = CliPositionalArg[Annotated[str, AfterValidator(_instance_url)]]


class ProxySettings(CommandSettings):
    """What every command needs to reach the proxy."""

    # pydantic's models have a method `json`, so the field has a longer name and the flag both.
    model_config = SettingsConfigDict(cli_shortcuts={"json-output": "json"})

    url: Annotated[str, AfterValidator(_proxy_url)] = Field(
        "http://127.0.0.1:8000", description="the proxy to talk to"
    )
    admin_api_key: CliSuppress[SecretStr | None] = Field(
        None, validation_alias="ADMIN_API_KEY", description="key for the admin API"
    )
    json_output: bool = Field(False, description="print the proxy's JSON instead of a table")


class ListSettings(ProxySettings):
    """List the instances of a proxy, with their states.

    examples:
      epdctl instances list
      epdctl instances list --url http://proxy:8000 --json
    """


class ShowSettings(ProxySettings):
    """Show everything that a proxy knows about one instance.

    examples:
      epdctl instances show http://e1:8001
    """

    instance: Instance = Field(description="URL of the instance")


def _with_underscore(value: object) -> object:
    return value.lower().replace("-", "_") if isinstance(value, str) else value


RoleName = Annotated[
    Literal["encode", "prefill", "decode", "prefill_decode"], BeforeValidator(_with_underscore)
]


class RegisterSettings(ProxySettings):
    """Register an instance, and wait until it is ready if asked to. Needs ADMIN_API_KEY.

    examples:
      epdctl instances register http://e1:8001 --role encode --wait-ready 300
      epdctl instances register http://pd:8002 --role prefill_decode --ec-zmq-addrs tcp://pd:9100
    """

    # EPDCTL_MODEL is a worker's checkpoint, often a path: an instance's name must not come from there.
    model_config = SettingsConfigDict(cli_shortcuts={"json-output": "json", "instance-model": "model"})

    instance: Instance = Field(description="URL of the instance")
    role: RoleName = Field(description="what it does: encode, prefill, decode or prefill_decode")
    ec_zmq_addrs: str = Field("", description="EC control addresses of a consumer, one a replica, by comma")
    dp_size: int = Field(1, ge=1, description="data-parallel replicas behind the URL")
    instance_model: str | None = Field(
        None, description="model it serves; asked from /v1/models unless given"
    )
    labels: str = Field("", description="labels as name=value pairs by comma, for example group=a")
    kv_bootstrap_addr: str | None = Field(
        None, description="bootstrap URL of a prefill instance with the mooncake KV connector"
    )
    wait_ready: float = Field(
        0, ge=0, le=86_400, description="seconds to wait until the instance is ready; 0 does not wait"
    )

    @model_validator(mode="after")
    def _check_labels(self) -> RegisterSettings:
        split_pairs("--labels", self.labels)
        return self

    def registration(self) -> dict[str, Any]:
        """Return the body of `POST /instances`."""
        return {
            "role": self.role,
            "url": self.instance,
            "ec_zmq_addrs": split_list(self.ec_zmq_addrs),
            "dp_size": self.dp_size,
            "model": self.instance_model,
            "labels": split_pairs("--labels", self.labels),
            "kv_bootstrap_addr": self.kv_bootstrap_addr,
        }


class RemoveSettings(ProxySettings):
    """Remove an instance at once; requests in flight go on. Needs ADMIN_API_KEY.

    examples:
      epdctl instances remove http://e1:8001 --missing-ok
    """

    instance: Instance = Field(description="URL of the instance")
    missing_ok: bool = Field(False, description="an instance that is not registered is no failure")


class DrainSettings(ProxySettings):
    """Give an instance no new work, and remove it when nothing is in flight. Needs ADMIN_API_KEY.

    examples:
      epdctl instances drain http://e1:8001 --timeout 120
    """

    instance: Instance = Field(description="URL of the instance")
    timeout: float = Field(30, ge=0, le=3600, description="seconds after which it is removed all the same")
    missing_ok: bool = Field(False, description="an instance that is not registered is no failure")
