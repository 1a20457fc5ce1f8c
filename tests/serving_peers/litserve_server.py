"""LitServe: python litserve_server.py PORT."""

import sys

import litserve
import numpy as np


class Peer(litserve.LitAPI):
    def setup(self, device) -> None:
        import engine

        self.engine = engine

    def decode_request(self, request):
        return np.asarray(request["x"], np.float32)

    def predict(self, x):
        return self.engine.run(x)

    def encode_response(self, output):
        return {"logits": output.tolist()}


if __name__ == "__main__":
    server = litserve.LitServer(Peer(), accelerator="cpu", workers_per_device=1)
    server.run(port=int(sys.argv[1]), num_api_servers=1, log_level="error", generate_client_file=False)
