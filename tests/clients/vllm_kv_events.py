"""KV events, decoded by the classes of vLLM's own package, which need nothing else of it."""

import importlib.util
import json
import os
import sys
import types
import urllib.request

import msgspec
import zmq

from common import main


class Unneeded(types.ModuleType):
    """A module that has whatever is imported from it."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__init__": lambda *_: None})


def vllm_events():
    """vLLM's module of KV events. What it imports from the rest of vLLM, events do not need."""
    folder = importlib.util.find_spec("vllm").submodule_search_locations[0]
    for name in [
        "vllm",
        "vllm.config",
        "vllm.config.kv_events",
        "vllm.logger",
        "vllm.utils",
        "vllm.utils.network_utils",
        "vllm.v1",
        "vllm.v1.core",
        "vllm.v1.core.kv_cache_utils",
    ]:
        sys.modules[name] = Unneeded(name)
    sys.modules["vllm.v1.core.kv_cache_utils"].ExternalBlockHash = bytes | int
    path = os.path.join(folder, "distributed", "kv_events.py")
    spec = importlib.util.spec_from_file_location("vllm_kv_events", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["vllm_kv_events"] = module
    spec.loader.exec_module(module)
    return module


EVENTS = vllm_events()
DECODER = msgspec.msgpack.Decoder(EVENTS.KVEventBatch)


def post(server, path, body):
    request = urllib.request.Request(server.address + path, json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=100) as answer:
        return json.load(answer)


def socket(kind, endpoint):
    made = zmq.Context.instance().socket(kind)
    made.setsockopt(zmq.RCVTIMEO, 30_000)
    made.connect(os.environ[endpoint].replace("*", "127.0.0.1"))
    return made


def case_blocks_of_a_prompt(server):
    subscriber = socket(zmq.SUB, "KV_EVENTS")
    subscriber.setsockopt_string(zmq.SUBSCRIBE, "")
    # Messages before the subscription has come are lost: ask until one comes.
    for attempt in range(20):
        text = f"Attempt {attempt}. " + "Once upon a time there was a rabbit. " * 20
        tokens = post(server, "/tokenize", {"content": text})["tokens"]
        post(server, "/v1/completions", {"prompt": tokens, "max_tokens": 1})
        if subscriber.poll(500):
            break
    topic, number, payload = subscriber.recv_multipart()
    assert topic.startswith(b"kv@") and topic.endswith(server.model.encode()), topic
    batch = DECODER.decode(payload)
    stored = batch.events[0]
    assert isinstance(stored, EVENTS.BlockStored), stored
    assert stored.token_ids == tokens[: len(stored.token_ids)], stored
    assert len(stored.token_ids) == stored.block_size * len(stored.block_hashes) > 0, stored
    assert (stored.parent_block_hash, stored.medium, stored.group_idx) == (None, EVENTS.MEDIUM_GPU, 0)
    assert (stored.kv_cache_spec_kind, stored.kv_cache_spec_sliding_window) == ("full_attention", None)

    # Each other group has some of the same blocks.
    others = [event for event in batch.events if event.group_idx]
    while not others:
        batch = DECODER.decode(subscriber.recv_multipart()[2])
        others = [event for event in batch.events if event.group_idx]
    for event in others:
        assert isinstance(event, EVENTS.BlockStored) and set(event.block_hashes) <= set(stored.block_hashes), event
        assert len(event.token_ids) == event.block_size * len(event.block_hashes) > 0, event
        window = event.kv_cache_spec_sliding_window
        assert (event.kv_cache_spec_kind, window is None) in [("sliding_window", False), ("mamba", True)], event

    asking = socket(zmq.REQ, "KV_EVENTS_REPLAY")
    asking.send(number)
    again = asking.recv_multipart()
    assert again == [topic, number, payload], again


def case_size_of_the_cache(server):
    with urllib.request.urlopen(server.address + "/metrics") as answer:
        lines = answer.read().decode().splitlines()
    line = next(line for line in lines if line.startswith("vllm:cache_config_info{"))
    assert 'block_size="64"' in line and 'num_gpu_blocks="0"' not in line, line


main(globals())
