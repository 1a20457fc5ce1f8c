"""KServe's clients, over HTTP and gRPC: python kserve_client.py HTTP_PORT GRPC_PORT MODEL INPUT.npy TOKEN.

Prints what they were answered, as JSON.
"""

import asyncio
import json
import sys

import numpy as np
from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest, RESTConfig


async def over_http(port: str, model: str, x: np.ndarray, token: str) -> dict:
    client = InferenceRESTClient(RESTConfig(protocol="v2", retries=0))
    url, headers = f"http://127.0.0.1:{port}", {"Authorization": f"Bearer {token}"}
    told = {
        "live": await client.is_server_live(url, headers),
        "ready": await client.is_server_ready(url, headers),
        "model ready": await client.is_model_ready(url, model, headers),
    }
    for binary in (False, True):
        answer = await client.infer(url, asked(model, x, binary), model_name=model, headers=headers)
        told["binary" if binary else "json"] = answer.outputs[0].as_numpy().tolist()
    await client.close()
    return told


async def over_grpc(port: str, model: str, x: np.ndarray, token: str) -> dict:
    client = InferenceGRPCClient(f"127.0.0.1:{port}", retries=0)
    headers = [("authorization", f"Bearer {token}")]
    told = {
        "live": await client.is_server_live(headers=headers),
        "ready": await client.is_server_ready(headers=headers),
        "model ready": await client.is_model_ready(model, headers=headers),
    }
    answer = await client.infer(asked(model, x, binary=False), headers=headers)
    told["outputs"] = answer.outputs[0].as_numpy().tolist()
    await client.close()
    return told


def asked(model: str, x: np.ndarray, binary: bool) -> InferRequest:
    given = InferInput("x_nchw", list(x.shape), "FP32")
    given.set_data_from_numpy(x, binary_data=binary)
    return InferRequest(model_name=model, infer_inputs=[given])


http_port, grpc_port, name, file, secret = sys.argv[1:]
array = np.load(file)
told = {
    "http": asyncio.run(over_http(http_port, name, array, secret)),
    "grpc": asyncio.run(over_grpc(grpc_port, name, array, secret)),
}
print(json.dumps(told))
