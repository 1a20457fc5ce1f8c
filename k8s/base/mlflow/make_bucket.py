"""Makes the bucket of runs and of MLflow's artifacts, unless it is there. Waits for the store, aloud."""

import sys
import time
from typing import Any

import boto3
from botocore.exceptions import BotoCoreError, ClientError

PATIENCE_S = 300


def make(store: Any, bucket: str) -> None:
    """Make the bucket, unless it is there."""
    try:
        store.head_bucket(Bucket=bucket)
    except ClientError as error:
        if error.response["ResponseMetadata"]["HTTPStatusCode"] != 404:
            raise
        region = store.meta.region_name
        there = {} if region == "us-east-1" else {"CreateBucketConfiguration": {"LocationConstraint": region}}
        store.create_bucket(Bucket=bucket, **there)
        print(f"made bucket {bucket}", flush=True)


def main(bucket: str) -> None:
    """Make the bucket as soon as the store answers."""
    store = boto3.client("s3")
    give_up = time.monotonic() + PATIENCE_S
    while True:
        try:
            return make(store, bucket)
        except (BotoCoreError, ClientError) as error:
            if time.monotonic() > give_up:
                sys.exit(f"error: no bucket {bucket}: {error} -> see the store's log, the secret hpml-store")
            print(f"waiting for the store: {error}", flush=True)
            time.sleep(2)


if __name__ == "__main__":
    main(sys.argv[1])
