"""The generated Grafana dashboard."""

import json

from deploy.monitoring import dashboard


def test_dashboard_file_is_up_to_date() -> None:
    written = json.loads(dashboard.FILE.read_text())
    assert written == dashboard.dashboard(), "python -m deploy.monitoring.dashboard writes it"
    panels = written["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= dashboard.WIDTH for panel in panels)
