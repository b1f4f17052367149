"""The household on the network: identity, pairing, discovery, membership, election, links."""
