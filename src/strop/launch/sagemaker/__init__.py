"""SageMaker training jobs by boto3: requests, status and logs, and the program in the container."""
