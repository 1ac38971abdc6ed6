#!/bin/bash
# gcp.sh PROJECT ZONE IMAGE: a managed group of spot instances, and their checkpoints. Beside this file: agent.yaml.
set -euo pipefail
project=$1 zone=$2 image=$3
region=${zone%-*}
bucket=$project-elastic-runs
account=elastic-agent@$project.iam.gserviceaccount.com
gcloud config set project "$project"

gcloud storage buckets create "gs://$bucket" --location "$region" --uniform-bucket-level-access --public-access-prevention
gcloud iam service-accounts create elastic-agent
gcloud storage buckets add-iam-policy-binding "gs://$bucket" \
  --member "serviceAccount:$account" --role roles/storage.objectUser

gcloud compute instance-templates create elastic-agent \
  --machine-type g2-standard-4 --image "$image" \
  --provisioning-model SPOT --instance-termination-action DELETE --maintenance-policy TERMINATE \
  --service-account "$account" --scopes https://www.googleapis.com/auth/devstorage.read_write \
  --no-address --metadata-from-file "user-data=$(dirname "$0")/agent.yaml"
gcloud compute instance-groups managed create elastic-agents --zone "$zone" --template elastic-agent --size 8
