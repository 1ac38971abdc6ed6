#!/bin/bash
# azure.sh GROUP LOCATION IMAGE SUBNET: a scale set of spot instances, and their checkpoints. GROUP is a resource group,
# IMAGE and SUBNET are ids. Beside this file: agent.yaml.
set -euo pipefail
group=$1 location=$2 image=$3 subnet=$4
account=elasticruns$(printf %s "$group" | sha256sum | cut -c 1-12)

az storage account create --resource-group "$group" --location "$location" --name "$account" \
  --sku Standard_LRS --kind StorageV2 --hns true --allow-blob-public-access false --min-tls-version TLS1_2
az storage container create --account-name "$account" --name runs --auth-mode login
az identity create --resource-group "$group" --location "$location" --name elastic-agent
scope=$(az storage account show --resource-group "$group" --name "$account" --query id --output tsv)
az role assignment create --role "Storage Blob Data Contributor" \
  --scope "$scope/blobServices/default/containers/runs" \
  --assignee-object-id "$(az identity show --resource-group "$group" --name elastic-agent --query principalId --output tsv)" \
  --assignee-principal-type ServicePrincipal

az vmss create --resource-group "$group" --location "$location" --name elastic-agents \
  --image "$image" --vm-sku Standard_NC4as_T4_v3 --instance-count 8 --orchestration-mode Uniform \
  --priority Spot --eviction-policy Delete --max-price -1 --subnet "$subnet" \
  --assign-identity "$(az identity show --resource-group "$group" --name elastic-agent --query id --output tsv)" \
  --custom-data "$(dirname "$0")/agent.yaml" --admin-username operator --generate-ssh-keys
