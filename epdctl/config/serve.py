"""Settings of `epdctl serve`.

Rules of this file: names follow vLLM's example proxy (`disagg_epd_proxy.py`, 0.33), so that its launch line
moves over unchanged; its checks and messages are kept, and the differences are listed in
`docs/configuration.md`. Defaults exist here and nowhere else.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, FilePath, SecretStr, field_validator, model_validator
from pydantic_settings import CliSuppress

from epdctl.config import CommandSettings
from epdctl.config.stages import StageTimeouts, parse_stage_timeouts
from epdctl.config.text import checked, split_list
from epdctl.domain import InstanceSpec, Role
from epdctl.logs import LogFormat, LogLevel
from epdctl.registry.addresses import check_consumer_addresses, normalise_url
from epdctl.registry.policies import PolicyName

NO_PREFILL = frozenset({"none", "disable"})


def state_folder() -> Path:
    """Return the user's folder for state that survives a restart (XDG base directory specification)."""
    base = os.environ.get("XDG_STATE_HOME", "")
    return (Path(base) if base.startswith("/") else Path.home() / ".local" / "state") / "epdctl"


Seconds = Annotated[float, Field(ge=0, le=86_400, allow_inf_nan=False)]


class ServeSettings(CommandSettings):
    """Run the proxy and the control plane.

    Examples:
      ADMIN_API_KEY=secret epdctl serve --dynamic-registration
      epdctl serve --encode-servers-urls http://e1:8001,http://e2:8001 --decode-servers-urls http://pd:8002
    """

    host: str = Field("0.0.0.0", description="address to listen on")  # noqa: S104 - as the reference proxy
    port: int = Field(8000, ge=0, le=65535, description="port to listen on; 0 picks a free one")

    dynamic_registration: bool = Field(
        False, description="let launchers register instances over POST /instances (needs ADMIN_API_KEY)"
    )
    admin_api_key: CliSuppress[SecretStr | None] = Field(
        None, validation_alias="ADMIN_API_KEY", description="key that admin calls carry in X-API-Key"
    )
    protect_reads: bool = Field(False, description="ask for the admin key on GET /instances too")
    store: str = Field(
        "",
        description="where registrations live: 'memory' or 'sqlite:PATH'; by default serve-PORT.db in the "
        "user's state folder with --dynamic-registration, else memory",
    )

    encode_servers_urls: str = Field("", description="static encode instances, comma-separated URLs")
    prefill_servers_urls: str = Field(
        "none", description="static prefill instances; 'none' or 'disable' for E+PD"
    )
    decode_servers_urls: str = Field(
        "", description="static decode instances, or prefill_decode ones when there is no static prefill"
    )
    ec_consumer_zmq_addrs: str = Field(
        "",
        description="EC control addresses of the static consumers (prefill_decode, or prefill when given), "
        "one a replica: s0r0,s0r1,s1r0,s1r1",
    )
    ec_consumer_dp_size: int = Field(1, description="data-parallel replicas of each static EC consumer")

    probe_interval: Seconds = Field(
        5.0, description="seconds between health probes; 0 leaves ready instances unprobed"
    )
    probe_timeout: float = Field(2.0, gt=0, le=3600, description="seconds a health probe may take")
    fail_threshold: int = Field(3, description="failed probes in a row that evict an instance")
    rise_threshold: int = Field(1, ge=1, description="healthy probes in a row that readmit an instance")
    evicted_ttl: float = Field(
        900.0, description="seconds after which an evicted or pending instance is forgotten; 0 keeps it"
    )

    encode_policy: PolicyName = Field("round_robin", description="how an item's encoder is chosen")
    prefill_policy: PolicyName = Field("round_robin", description="how a request's prefill is chosen")
    decode_policy: PolicyName = Field("round_robin", description="how a request's decode is chosen")
    kv_connector: Literal["nixl", "mooncake"] = Field(
        "nixl", description="KV hand-off from prefill to decode; labels.kv_connector of an instance wins"
    )
    no_rewrite: bool = Field(False, description="send media to the consumer unchanged (for stage timing)")
    decode_retries: int = Field(1, le=100, description="new attempts when decode answers 500; 0 disables")
    encoder_max_batch_size: int = Field(
        0,
        ge=0,
        validation_alias="ENCODER_MAX_BATCH_SIZE",
        description="images of one request in one encoder call; 0 is unlimited",
    )

    max_body_bytes: int = Field(256 * 1024**2, ge=1024, description="largest request body; larger: 413")
    max_items: int = Field(64, ge=1, description="media items in one request; more: 400")
    max_json_depth: int = Field(64, ge=8, le=512, description="nesting of a request body; deeper: 400")
    max_concurrent_requests: int = Field(0, ge=0, description="requests served at once; 0 is unlimited")
    queue_size: int = Field(
        128, ge=0, description="requests that may wait for a slot of --max-concurrent-requests; more: 429"
    )
    api_key_file: FilePath | None = Field(
        None, description="file with one data-plane API key a line (besides EPDCTL_API_KEYS)"
    )
    api_keys: CliSuppress[SecretStr | None] = Field(
        None, validation_alias="EPDCTL_API_KEYS", description="data-plane API keys, comma-separated"
    )
    upstream_api_key: CliSuppress[SecretStr | None] = Field(
        None,
        validation_alias="EPDCTL_UPSTREAM_API_KEY",
        description="bearer key for the instances, probes included",
    )
    upstream_ca_file: FilePath | None = Field(
        None, description="PEM file with the certificate authorities of https instances"
    )
    stage_timeouts: str = Field(
        "",
        description="deadlines in seconds, for example encode=60,idle=300; the rest keeps its default "
        "(connect=5, encode=60, prefill=300, first_byte=300, idle=300, queue=30)",
    )

    shutdown_grace: Seconds = Field(30.0, description="seconds that running requests get after SIGTERM")
    drain_delay: Seconds = Field(
        5.0, description="seconds between SIGTERM (not ready) and refusing new connections"
    )
    log_requests: bool = Field(False, description="log each request as it arrives, and everything at debug")
    log_format: LogFormat = Field("json", description="log lines as JSON or for people")
    log_level: LogLevel = Field("info", description="least severe level that is logged")

    @field_validator("prefill_servers_urls", mode="before")
    @classmethod
    def _nothing_is_no_prefill(cls, value: Any) -> Any:
        return "none" if isinstance(value, str) and not split_list(value) else value  # as the reference proxy

    @field_validator("fail_threshold", "ec_consumer_dp_size")
    @classmethod
    def _at_least_one(cls, value: int) -> int:
        if value < 1:
            raise ValueError("must be at least 1")
        return value

    @field_validator("decode_retries")
    @classmethod
    def _negative_means_none(cls, value: int) -> int:
        return max(0, value)  # as the reference proxy

    @field_validator("stage_timeouts")
    @classmethod
    def _known_stages(cls, value: str) -> str:
        parse_stage_timeouts(value)
        return value

    @field_validator("store")
    @classmethod
    def _known_store(cls, value: str) -> str:
        if value not in ("", "memory") and not value.removeprefix("sqlite:").strip():
            raise ValueError("sqlite needs a path, for example sqlite:/var/lib/epdctl/serve.db")
        if value not in ("", "memory") and not value.startswith("sqlite:"):
            raise ValueError(f"'{value}' is neither 'memory' nor 'sqlite:PATH'")
        return value

    @model_validator(mode="after")
    def _checks_across_fields(self) -> ServeSettings:
        self._check_mode()
        self._check_keys()
        self.static_specs()
        if not self.max_concurrent_requests:
            self.refuse_idle("queue_size", why="without --max-concurrent-requests", variables_count=False)
        return self

    def _check_mode(self) -> None:
        if self.dynamic_registration:
            if self.admin_api_key is None:
                raise ValueError("--dynamic-registration requires ADMIN_API_KEY")
            return
        if not split_list(self.encode_servers_urls) or not split_list(self.decode_servers_urls):
            raise ValueError(
                "Static routing requires --encode-servers-urls and --decode-servers-urls "
                "(or use --dynamic-registration)"
            )
        if self.store.startswith("sqlite:"):
            raise ValueError("--store keeps dynamic instances only, it needs --dynamic-registration")

    def _check_keys(self) -> None:
        if self.protect_reads and self.admin_api_key is None:
            raise ValueError("--protect-reads requires ADMIN_API_KEY")
        if self.api_keys is not None and not split_list(self.api_keys.get_secret_value()):
            raise ValueError("EPDCTL_API_KEYS: there is no key in it")
        if self.api_key_file is not None and not self._keys_in_file():
            raise ValueError(f"--api-key-file: no key in {self.api_key_file}")

    def static_specs(self) -> tuple[InstanceSpec, ...]:
        """Return the instances that the static flags name; ValueError says which flag is wrong."""
        prefill = (
            () if self.prefill_servers_urls.lower() in NO_PREFILL else split_list(self.prefill_servers_urls)
        )
        decode = split_list(self.decode_servers_urls)
        consumer_role = Role.PREFILL if prefill else Role.PREFILL_DECODE
        consumer_flag = "--prefill-servers-urls" if prefill else "--decode-servers-urls"
        consumers = prefill or decode
        specs = [
            *_specs("--encode-servers-urls", Role.ENCODE, split_list(self.encode_servers_urls)),
            *self._consumers(consumer_flag, consumer_role, consumers),
            *_specs("--decode-servers-urls", Role.DECODE, decode if prefill else ()),
        ]
        _refuse_duplicates(specs)
        return tuple(specs)

    def _consumers(self, flag: str, role: Role, urls: tuple[str, ...]) -> list[InstanceSpec]:
        addresses = split_list(self.ec_consumer_zmq_addrs)
        size = self.ec_consumer_dp_size
        expected = len(urls) * size
        if addresses and len(addresses) != expected:
            raise ValueError(
                "--ec-consumer-zmq-addrs must contain one address per consumer replica: "
                f"expected {expected} ({len(urls)} servers x {size} replicas), got {len(addresses)}"
            )
        checked("--ec-consumer-zmq-addrs", lambda: check_consumer_addresses(addresses, len(addresses)))
        return [
            replace(spec, dp_size=size, ec_zmq_addrs=addresses[index * size : (index + 1) * size])
            for index, spec in enumerate(_specs(flag, role, urls))
        ]

    def timeouts(self) -> StageTimeouts:
        """Return the deadlines of the stages."""
        return parse_stage_timeouts(self.stage_timeouts)

    def store_location(self) -> Path | None:
        """Return the SQLite file that keeps registrations, or None for memory."""
        if self.store.startswith("sqlite:"):
            return Path(self.store.removeprefix("sqlite:")).expanduser()
        if self.store == "memory" or not self.dynamic_registration or self.port == 0:
            return None
        return state_folder() / f"serve-{self.port}.db"

    def data_plane_keys(self) -> frozenset[str]:
        """Return the API keys that clients may use; none means that no key is asked for."""
        given = split_list(self.api_keys.get_secret_value()) if self.api_keys else ()
        return frozenset({*given, *(self._keys_in_file() if self.api_key_file else ())})

    def _keys_in_file(self) -> tuple[str, ...]:
        assert self.api_key_file is not None
        try:
            text = self.api_key_file.read_text("utf-8")
        except (OSError, UnicodeDecodeError):
            raise ValueError(f"--api-key-file: cannot read {self.api_key_file}") from None
        return tuple(line.strip() for line in text.splitlines() if line.strip())


def _specs(flag: str, role: Role, urls: tuple[str, ...]) -> list[InstanceSpec]:
    return [
        InstanceSpec(url=checked(flag, partial(normalise_url, url)), role=role, static=True) for url in urls
    ]


def _refuse_duplicates(specs: list[InstanceSpec]) -> None:
    seen: dict[str, Role] = {}
    for spec in specs:
        if spec.url in seen:
            raise ValueError(f"{spec.url} is named twice in the static flags ({seen[spec.url]}, {spec.role})")
        seen[spec.url] = spec.role
