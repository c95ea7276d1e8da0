"""S3, GCS and Azure through obstore: their stores, errors, and options. Imported where obstore is installed."""
