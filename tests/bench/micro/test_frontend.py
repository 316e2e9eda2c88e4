"""`python -m bench.micro.frontend` measures a real frontend under a few streams; its figures are plausible."""

from bench.micro import frontend


def test_load_burst_and_first_token_measure_real_frontends() -> None:
    with frontend.frontends(2) as (script, servers):
        for ask in sorted(frontend.REQUESTS):
            row = frontend.load(script, servers, 4, 2, 5, ask)
            assert 1.0 < row.token_us < 100_000.0 and row.admission_us > 10.0
        assert "4 ended with [DONE]" in frontend.burst(script, servers, 4, 3)
        assert len(frontend.first(script, servers[0], 3)) == 3
