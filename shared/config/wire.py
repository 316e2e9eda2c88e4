"""The settings of the sockets between workers and frontends."""

from dataclasses import dataclass

from shared.config.declaration import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class WireConfig:
    """Addresses between worker and frontends: ipc://PATH on one host, tcp://HOST:PORT across hosts."""

    request_address: str = setting("", "address of the worker's request socket; empty: under --run-dir")
    event_address: str = setting("", "address of the worker's event socket; empty: under --run-dir")
    run_dir: str = setting("", "folder (mode 0700) for sockets; empty: a temporary one for this server")
    curve_dir: str = setting("", "folder with CURVE keys for tcp:// addresses")
    insecure: bool = setting(False, "allow tcp:// addresses without CURVE keys")

    @property
    def requests(self) -> str:
        return self.request_address or f"ipc://{self.run_dir}/requests.sock"

    @property
    def events(self) -> str:
        return self.event_address or f"ipc://{self.run_dir}/events.sock"
