from __future__ import annotations

from typing import Any

import msgspec
import pytest
import trio

from ksana.errors import ServiceError
from ksana.gateway.app import create_app
from ksana.gateway.auth import OPEN_PATHS
from ksana.messages.blocks import CacheCounters
from ksana.messages.outputs import Failed
from ksana.messages.stores import RemoteCacheStatus
from tests.gateway.fake_client import FakeClient, endless, fails, says
from tests.gateway.serving import CHAT, eventually, running

KEY = {"Authorization": "Bearer secret"}


async def test_every_route_but_health_and_ready_asks_for_the_key() -> None:
    async with running(api_key="secret") as gateway:
        app = create_app(gateway.gateway)
        rules = [(rule.rule, method) for rule in app.url_map.iter_rules() for method in rule.methods or ()]
        assert {path for path, _ in rules} >= {"/v1/chat/completions", "/generate", "/metrics", "/version"}
        for path, method in [*rules, ("/nothing", "GET"), ("/", "GET"), ("/static/x", "GET")]:
            path = path.replace("<path:name>", "fake")
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic secret"}):
                answer = await gateway.http.request(method, path, headers=headers)
                if path in OPEN_PATHS:
                    assert answer.status_code == 200, (path, method)
                else:
                    assert answer.status_code == 401, (path, method)
                    assert answer.headers["www-authenticate"] == "Bearer"
                    if method != "HEAD":
                        assert answer.json()["error"]["code"] == "invalid_api_key"
        assert (await gateway.http.get("/v1/models", headers=KEY)).status_code == 200
        assert gateway.client.asked == []


async def test_several_keys_from_a_file(tmp_path: Any) -> None:
    file = tmp_path / "keys"
    file.write_text("one\ntwo\n")
    async with running(api_key_file=str(file)) as gateway:
        for key, status in (("one", 200), ("two", 200), ("one\ntwo"[:3] + "x", 401)):
            answer = await gateway.http.get("/v1/models", headers={"Authorization": f"Bearer {key}"})
            assert answer.status_code == status, key


async def test_cache_salts_differ_between_keys(tmp_path: Any) -> None:
    file = tmp_path / "keys"
    file.write_text("one\ntwo\n")
    async with running(api_key_file=str(file)) as gateway:
        for key, salt in (("one", ""), ("two", ""), ("one", "a"), ("one", "a"), ("two", "a")):
            body = {**CHAT, "cache_salt": salt}
            await gateway.post("/v1/chat/completions", body, Authorization=f"Bearer {key}")
        salts = [asked.cache_salt for asked in gateway.client.asked]
    assert salts[2] == salts[3]
    assert len(set(salts)) == 4
    assert all("one" not in salt and "two" not in salt for salt in salts)


async def test_without_keys_the_salt_is_the_request_s() -> None:
    async with running() as gateway:
        await gateway.post("/v1/chat/completions", {**CHAT, "cache_salt": "mine"})
        await gateway.post("/v1/chat/completions", CHAT)
        assert [asked.cache_salt for asked in gateway.client.asked] == ["mine", ""]


async def test_request_ids_are_echoed_made_and_passed_on() -> None:
    async with running() as gateway:
        answer = await gateway.post("/v1/chat/completions", CHAT, **{"X-Request-Id": "abc-1"})
        assert answer.headers["x-request-id"] == "abc-1"
        assert gateway.client.asked[0].external_id == "abc-1"
        for bad in ("x" * 1000, "a b", 'a"b', "ä".encode().decode("latin1")):
            answer = await gateway.http.get("/version", headers={"X-Request-Id": bad.encode("latin1")})  # type: ignore[dict-item]
            assert answer.headers["x-request-id"] not in ("", bad)
        answer = await gateway.http.get("/nothing")
        assert len(answer.headers["x-request-id"]) == 32


async def test_paths_and_methods_that_do_not_exist() -> None:
    async with running() as gateway:
        for path in ("/nothing", "/v2/x", "/static/app.js", "/%ff%00"):
            answer = await gateway.http.get(path)
            assert answer.status_code == 404
            assert answer.json()["error"]["code"] == "not_found"
        answer = await gateway.http.get("/v1/chat/completions")
        assert answer.status_code == 405
        assert answer.json()["error"]["code"] == "method_not_allowed"
        assert "POST" in answer.headers["allow"]


async def test_models() -> None:
    async with running() as gateway:
        (model,) = (await gateway.http.get("/v1/models")).json()["data"]
        assert model["id"] == "fake"
        assert model["max_model_len"] == 2048
        assert (await gateway.http.get("/v1/models/fake")).json() == model
        answer = await gateway.http.get("/v1/models/org/other")
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "model_not_found"


async def test_cors() -> None:
    async with running(allowed_origins=("https://good.example",), api_key="secret") as gateway:
        ask = {"Origin": "https://good.example", "Access-Control-Request-Method": "POST"}
        answer = await gateway.http.request("OPTIONS", "/v1/chat/completions", headers=ask)
        assert answer.status_code == 204
        assert answer.headers["access-control-allow-origin"] == "https://good.example"
        assert "Authorization" in answer.headers["access-control-allow-headers"]
        for origin, allowed in (("https://good.example", True), ("https://evil.example", False)):
            for headers in (KEY, {}):  # an error must be readable by the page too
                answer = await gateway.http.get("/v1/models", headers={**headers, "Origin": origin})
                assert ("access-control-allow-origin" in answer.headers) is allowed
                assert answer.headers["vary"] == "Origin"
        ask["Origin"] = "https://evil.example"
        answer = await gateway.http.request("OPTIONS", "/v1/models", headers=ask)
        assert "access-control-allow-origin" not in answer.headers


async def test_no_cors_headers_by_default() -> None:
    async with running() as gateway:
        answer = await gateway.http.get("/v1/models", headers={"Origin": "https://x"})
        assert not any(name.startswith("access-control") for name in answer.headers)


async def test_health_is_about_progress() -> None:
    async with running(stall_timeout=60) as gateway:
        assert (await gateway.http.get("/health")).status_code == 200
        gateway.client.change_status(last_progress_s=30.0)
        answer = await gateway.http.get("/health")
        assert answer.status_code == 503
        assert "70 s" in answer.json()["error"]["message"]
        gateway.client.change_status(num_running=0, num_waiting=0)
        assert (await gateway.http.get("/health")).status_code == 200
        gateway.client.change_status(worker_state="given_up")
        assert (await gateway.http.get("/health")).status_code == 503


async def test_ready_is_about_taking_requests() -> None:
    async with running() as gateway:
        assert (await gateway.http.get("/ready")).status_code == 200
        gateway.client.change_status(worker_state="restarting")
        assert (await gateway.http.get("/ready")).status_code == 503
        assert (await gateway.http.get("/health")).status_code == 200
        gateway.client.change_status(worker_state="ready", draining=True)
        assert (await gateway.http.get("/ready")).status_code == 503


async def test_a_full_queue_is_a_429_with_retry_after() -> None:
    async with running(endless(), capacity=2) as gateway, trio.open_nursery() as nursery:
        for _ in range(2):
            nursery.start_soon(gateway.post, "/v1/chat/completions", CHAT)
        await eventually(lambda: len(gateway.client.asked) == 2)
        for streaming in (False, True):
            answer = await gateway.post("/v1/chat/completions", {**CHAT, "stream": streaming})
            assert answer.status_code == 429
            assert int(answer.headers["retry-after"]) >= 1
            assert answer.json()["error"]["code"] == "queue_full"
        nursery.cancel_scope.cancel()


async def test_prompts_that_do_not_all_fit_are_all_given_up() -> None:
    async with running(endless(), capacity=2) as gateway:
        answer = await gateway.post("/v1/completions", {"prompt": ["a", "b", "c"]})
        assert answer.status_code == 429
        assert sorted(gateway.client.aborted) == [1, 2]


async def test_a_client_that_refuses() -> None:
    async with running() as gateway:
        gateway.client.refusal = ServiceError("draining", status=503, retry_after_s=5)
        answer = await gateway.post("/v1/chat/completions", CHAT)
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "5"


@pytest.mark.parametrize("code", ["worker_lost", "shutting_down"])
async def test_every_503_says_when_to_come_back(code: str) -> None:
    async with running(fails(Failed(status=503, message="not now", code=code))) as gateway:
        for streaming in (False, True):
            answer = await gateway.post("/v1/chat/completions", {**CHAT, "stream": streaming})
            assert answer.status_code == 503
            assert int(answer.headers["retry-after"]) >= 1
        gateway.client.refusal = ServiceError("not now", status=503, code=code)
        answer = await gateway.post("/v1/chat/completions", CHAT)
        assert int(answer.headers["retry-after"]) >= 1
        gateway.client.change_status(worker_state="given_up")
        for path in ("/health", "/ready"):
            assert int((await gateway.http.get(path)).headers["retry-after"]) >= 1


async def test_bugs_are_a_plain_500_and_tell_nothing(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    def explode(*args: object, **more: object) -> None:  # noqa: ARG001
        raise ZeroDivisionError("secret detail")

    monkeypatch.setattr(FakeClient, "generate", explode)
    monkeypatch.setattr(FakeClient, "tokenize", explode)
    async with running() as gateway:
        for path, body in (("/v1/chat/completions", CHAT), ("/tokenize", {"prompt": "a"})):
            answer = await gateway.post(path, body, **{"X-Request-Id": "find-me"})
            assert answer.status_code == 500
            assert "secret" not in answer.text
            assert "Traceback" not in answer.text
            assert "find-me" in answer.json()["error"]["message"]
    assert "secret detail" in caplog.text


async def test_tokenize_and_detokenize() -> None:
    async with running() as gateway:
        answer = await gateway.post("/tokenize", {"prompt": "Hi"})
        assert answer.json() == {"count": 2, "max_model_len": 2048, "tokens": [72, 105], "token_strs": None}
        answer = await gateway.post("/tokenize", {"messages": CHAT["messages"]})
        assert answer.json()["tokens"] == [72, 105]
        assert (await gateway.post("/detokenize", {"tokens": [72, 105]})).json() == {"prompt": "Hi"}
        for path, body, param in (
            ("/tokenize", {"prompt": "a" * 5000}, "prompt"),
            ("/tokenize", {"messages": [{"role": "user", "content": "a" * 5000}]}, "messages"),
            ("/tokenize", {}, "prompt"),
            ("/tokenize", {"prompt": "a", "messages": CHAT["messages"]}, "prompt"),
            ("/detokenize", {"tokens": [5000]}, "tokens"),
            ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
            ("/detokenize", {}, "tokens"),
        ):
            answer = await gateway.post(path, body)
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == param


async def test_no_text_has_no_tokens() -> None:
    async with running() as gateway:
        for body in ({"prompt": ""}, {"prompt": "", "add_special_tokens": False}):
            answer = await gateway.post("/tokenize", body)
            assert answer.status_code == 200, answer.text
            assert (answer.json()["count"], answer.json()["tokens"]) == (0, [])
        assert (await gateway.post("/detokenize", {"tokens": []})).json() == {"prompt": ""}


async def test_version() -> None:
    async with running() as gateway:
        assert (await gateway.http.get("/version")).json()["version"]


async def metric(gateway: Any, line: str) -> float:
    text = (await gateway.http.get("/metrics")).text
    values = [one.rsplit(" ", 1)[1] for one in text.splitlines() if one.startswith(line)]
    assert len(values) == 1, (line, text)
    return float(values[0])


async def test_metrics() -> None:
    async with running(says("a", "b", "c", pause_s=0.01)) as gateway:
        for streaming in (False, True):
            await gateway.post("/v1/completions", {"prompt": ["x", "y"], "stream": streaming})
        gateway.client.script = fails(Failed(status=500, message="x"))
        await gateway.post("/v1/completions", {"prompt": "x"})
        labels = '{model_name="fake"}'
        for name, value in {
            "time_to_first_token_seconds_count": 4,
            "time_per_output_token_seconds_count": 4,
            "e2e_request_latency_seconds_count": 4,
            "num_requests_running": 3,
            "num_requests_waiting": 2,
            "kv_cache_usage_perc": 0.25,
            "prompt_tokens_total": 70,
            "generation_tokens_total": 30,
            "num_preemptions_total": 4,
            "prefix_cache_queries_total": 50,
            "prefix_cache_hits_total": 20,
            "worker_restarts_total": 2,
        }.items():
            assert await metric(gateway, f"ksana:{name}{labels}") == value, name
        for reason, count in (("stop", 5), ("length", 4), ("error", 2), ("abort", 5)):
            line = f'ksana:request_success_total{{finished_reason="{reason}",model_name="fake"}}'
            assert await metric(gateway, line) == count
        assert 0.005 < await metric(gateway, f"ksana:time_per_output_token_seconds_sum{labels}") / 4 < 0.2


async def test_metrics_of_the_cache_by_kind() -> None:
    async with running() as gateway:
        text = (await gateway.http.get("/metrics")).text
        assert "remote_cache" not in text
        remote = RemoteCacheStatus(
            num_loads=(("loaded", 3), ("no_room", 1)),
            num_loaded_blocks=7,
            num_loaded_bytes=700,
            num_saved_bytes=900,
            num_store_errors=2,
            num_queued_blocks=4,
            store_ok=False,
        )
        cache = CacheCounters(
            num_queried_tokens=500,
            num_fa_hit_tokens=200,
            num_hit_tokens=160,
            num_remote_hit_tokens=100,
            num_fa_evictions=5,
            num_swa_evictions=6,
        )
        state = gateway.client.state
        gateway.client.state = msgspec.structs.replace(
            state, remote=remote, cache=cache, swa_use=state.fa_use, num_loading=2
        )
        for line, value in {
            'prefix_cache_hit_tokens_total{kind="full_attention",': 200,
            'prefix_cache_hit_tokens_total{kind="sliding_window",': 160,
            'prefix_cache_hit_tokens_total{kind="local",': 60,
            'prefix_cache_hit_tokens_total{kind="remote",': 100,
            'cache_evictions_total{model_name="fake",pool="full_attention"}': 5,
            'cache_evictions_total{model_name="fake",pool="sliding_window"}': 6,
            'remote_cache_loads_total{model_name="fake",outcome="loaded"}': 3,
            'remote_cache_loads_total{model_name="fake",outcome="no_room"}': 1,
            'remote_cache_bytes_total{direction="loaded",': 700,
            'remote_cache_bytes_total{direction="saved",': 900,
            'remote_cache_blocks_total{direction="loaded",': 7,
            'remote_cache_faults_total{kind="error",': 2,
            "remote_cache_up{": 0,
            "remote_cache_queued_blocks{": 4,
            "num_requests_loading{": 2,
        }.items():
            assert await metric(gateway, f"ksana:{line}") == value, line
