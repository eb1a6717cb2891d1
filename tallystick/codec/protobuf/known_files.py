"""Files that a schema may import, and that neither a registry nor the package protobuf has.

Each is its FileDescriptorProto in base64, without comments, as its project's own compiler makes it.

google/type/*               https://github.com/googleapis/googleapis, Apache-2.0
                            (as in googleapis-common-protos 1.76.0)
confluent/*                 https://github.com/confluentinc/schema-registry, Apache-2.0
                            (as in confluent-kafka 2.16.1)
google/protobuf/*_features  https://github.com/protocolbuffers/protobuf, BSD-3-Clause, Copyright
                            2008 Google Inc. (as in grpcio-tools 1.85.1)
"""

KNOWN_FILES = {
    "confluent/meta.proto": (
        "ChRjb25mbHVlbnQvbWV0YS5wcm90bxIJY29uZmx1ZW50GiBnb29nbGUvcHJvdG9idWYvZGVzY3JpcHRvci5wcm90"
        "byKdAQoETWV0YRILCgNkb2MYASABKAkSKwoGcGFyYW1zGAIgAygLMhsuY29uZmx1ZW50Lk1ldGEuUGFyYW1zRW50"
        "cnkSDAoEdGFncxgDIAMoCRIeCgVydWxlcxgEIAMoCzIPLmNvbmZsdWVudC5SdWxlGi0KC1BhcmFtc0VudHJ5EgsK"
        "A2tleRgBIAEoCRINCgV2YWx1ZRgCIAEoCToCOAEiPAoEUnVsZRIMCgRuYW1lGAEgASgJEgsKA2RvYxgCIAEoCRIM"
        "CgRleHByGAMgASgJEgsKA3NxbBgEIAEoCTpBCglmaWxlX21ldGESHC5nb29nbGUucHJvdG9idWYuRmlsZU9wdGlv"
        "bnMYwAggASgLMg8uY29uZmx1ZW50Lk1ldGE6RwoMbWVzc2FnZV9tZXRhEh8uZ29vZ2xlLnByb3RvYnVmLk1lc3Nh"
        "Z2VPcHRpb25zGMAIIAEoCzIPLmNvbmZsdWVudC5NZXRhOkMKCmZpZWxkX21ldGESHS5nb29nbGUucHJvdG9idWYu"
        "RmllbGRPcHRpb25zGMAIIAEoCzIPLmNvbmZsdWVudC5NZXRhOkEKCWVudW1fbWV0YRIcLmdvb2dsZS5wcm90b2J1"
        "Zi5FbnVtT3B0aW9ucxjACCABKAsyDy5jb25mbHVlbnQuTWV0YTpMCg9lbnVtX3ZhbHVlX21ldGESIS5nb29nbGUu"
        "cHJvdG9idWYuRW51bVZhbHVlT3B0aW9ucxjACCABKAsyDy5jb25mbHVlbnQuTWV0YUIOWgwuLi9jb25mbHVlbnRi"
        "BnByb3RvMw=="
    ),
    "confluent/type/decimal.proto": (
        "Chxjb25mbHVlbnQvdHlwZS9kZWNpbWFsLnByb3RvEg5jb25mbHVlbnQudHlwZSI6CgdEZWNpbWFsEg0KBXZhbHVl"
        "GAEgASgMEhEKCXByZWNpc2lvbhgCIAEoDRINCgVzY2FsZRgDIAEoBWIGcHJvdG8z"
    ),
    "confluent/type/variant.proto": (
        "Chxjb25mbHVlbnQvdHlwZS92YXJpYW50LnByb3RvEg5jb25mbHVlbnQudHlwZSIqCgdWYXJpYW50EhAKCG1ldGFk"
        "YXRhGAEgASgMEg0KBXZhbHVlGAIgASgMYgZwcm90bzM="
    ),
    "confluent/types/decimal.proto": (
        "Ch1jb25mbHVlbnQvdHlwZXMvZGVjaW1hbC5wcm90bxocY29uZmx1ZW50L3R5cGUvZGVjaW1hbC5wcm90b1AAYgZw"
        "cm90bzM="
    ),
    "google/protobuf/cpp_features.proto": (
        "CiJnb29nbGUvcHJvdG9idWYvY3BwX2ZlYXR1cmVzLnByb3RvEgJwYhogZ29vZ2xlL3Byb3RvYnVmL2Rlc2NyaXB0"
        "b3IucHJvdG8i1gUKC0NwcEZlYXR1cmVzEo0CChJsZWdhY3lfY2xvc2VkX2VudW0YASABKAhC3gGIAQGYAQSYAQGi"
        "AQkSBHRydWUYhAeiAQoSBWZhbHNlGOcHsgG4AQjoBxDoBxqvAVRoZSBsZWdhY3kgY2xvc2VkIGVudW0gYmVoYXZp"
        "b3IgaW4gQysrIGlzIGRlcHJlY2F0ZWQgYW5kIGlzIHNjaGVkdWxlZCB0byBiZSByZW1vdmVkIGluIGVkaXRpb24g"
        "MjAyNS4gIFNlZSBodHRwOi8vcHJvdG9idWYuZGV2L3Byb2dyYW1taW5nLWd1aWRlcy9lbnVtLyNjcHAgZm9yIG1v"
        "cmUgaW5mb3JtYXRpb25SEGxlZ2FjeUNsb3NlZEVudW0SZgoLc3RyaW5nX3R5cGUYAiABKA4yGi5wYi5DcHBGZWF0"
        "dXJlcy5TdHJpbmdUeXBlQimIAQGYAQSYAQGiAQsSBlNUUklORxiEB6IBCRIEVklFVxjpB7IBAwjoB1IKc3RyaW5n"
        "VHlwZRJkChplbnVtX25hbWVfdXNlc19zdHJpbmdfdmlldxgDIAEoCEIoiAEBmAEGmAEBogEKEgVmYWxzZRiEB6IB"
        "CRIEdHJ1ZRjpB7IBAwjpB1IWZW51bU5hbWVVc2VzU3RyaW5nVmlldxJgCg1yZXBlYXRlZF90eXBlGAQgASgOMhwu"
        "cGIuQ3BwRmVhdHVyZXMuUmVwZWF0ZWRUeXBlQh2IAQGYAQSYAQGiAQsSBkxFR0FDWRiEB7IBAwiPTlIMcmVwZWF0"
        "ZWRUeXBlIkUKClN0cmluZ1R5cGUSFwoTU1RSSU5HX1RZUEVfVU5LTk9XThAAEggKBFZJRVcQARIICgRDT1JEEAIS"
        "CgoGU1RSSU5HEAMiQAoMUmVwZWF0ZWRUeXBlEhkKFVJFUEVBVEVEX1RZUEVfVU5LTk9XThAAEgoKBkxFR0FDWRAB"
        "EgkKBVBST1hZEAI6PwoDY3BwEhsuZ29vZ2xlLnByb3RvYnVmLkZlYXR1cmVTZXQY6AcgASgLMg8ucGIuQ3BwRmVh"
        "dHVyZXNSA2NwcA=="
    ),
    "google/protobuf/go_features.proto": (
        "CiFnb29nbGUvcHJvdG9idWYvZ29fZmVhdHVyZXMucHJvdG8SAnBiGiBnb29nbGUvcHJvdG9idWYvZGVzY3JpcHRv"
        "ci5wcm90byKUBwoKR29GZWF0dXJlcxK+AQoabGVnYWN5X3VubWFyc2hhbF9qc29uX2VudW0YASABKAhCgAGIAQGY"
        "AQaYAQGiAQkSBHRydWUYhAeiAQoSBWZhbHNlGOcHsgFbCOgHEOgHGlNUaGUgbGVnYWN5IFVubWFyc2hhbEpTT04g"
        "QVBJIGlzIGRlcHJlY2F0ZWQgYW5kIHdpbGwgYmUgcmVtb3ZlZCBpbiBhIGZ1dHVyZSBlZGl0aW9uLlIXbGVnYWN5"
        "VW5tYXJzaGFsSnNvbkVudW0SdAoJYXBpX2xldmVsGAIgASgOMhcucGIuR29GZWF0dXJlcy5BUElMZXZlbEI+iAEB"
        "mAEDmAEBogEaEhVBUElfTEVWRUxfVU5TUEVDSUZJRUQYhAeiAQ8SCkFQSV9PUEFRVUUY6QeyAQMI6AdSCGFwaUxl"
        "dmVsEnwKEXN0cmlwX2VudW1fcHJlZml4GAMgASgOMh4ucGIuR29GZWF0dXJlcy5TdHJpcEVudW1QcmVmaXhCMIgB"
        "AZgBBpgBB5gBAaIBGxIWU1RSSVBfRU5VTV9QUkVGSVhfS0VFUBiEB7IBAwjpB1IPc3RyaXBFbnVtUHJlZml4EoYB"
        "Cg1vcHRpbWl6ZV9tb2RlGAQgASgOMi8ucGIuR29GZWF0dXJlcy5PcHRpbWl6ZU1vZGVGZWF0dXJlLk9wdGltaXpl"
        "TW9kZUIwiAEBmAEDmAEBogEeEhlPUFRJTUlaRV9NT0RFX1VOU1BFQ0lGSUVEGIQHsgEDCOkHUgxvcHRpbWl6ZU1v"
        "ZGUaXgoTT3B0aW1pemVNb2RlRmVhdHVyZSJHCgxPcHRpbWl6ZU1vZGUSHQoZT1BUSU1JWkVfTU9ERV9VTlNQRUNJ"
        "RklFRBAAEgkKBVNQRUVEEAESDQoJQ09ERV9TSVpFEAIiUwoIQVBJTGV2ZWwSGQoVQVBJX0xFVkVMX1VOU1BFQ0lG"
        "SUVEEAASDAoIQVBJX09QRU4QARIOCgpBUElfSFlCUklEEAISDgoKQVBJX09QQVFVRRADIpIBCg9TdHJpcEVudW1Q"
        "cmVmaXgSIQodU1RSSVBfRU5VTV9QUkVGSVhfVU5TUEVDSUZJRUQQABIaChZTVFJJUF9FTlVNX1BSRUZJWF9LRUVQ"
        "EAESIwofU1RSSVBfRU5VTV9QUkVGSVhfR0VORVJBVEVfQk9USBACEhsKF1NUUklQX0VOVU1fUFJFRklYX1NUUklQ"
        "EAM6PAoCZ28SGy5nb29nbGUucHJvdG9idWYuRmVhdHVyZVNldBjqByABKAsyDi5wYi5Hb0ZlYXR1cmVzUgJnb0Iv"
        "Wi1nb29nbGUuZ29sYW5nLm9yZy9wcm90b2J1Zi90eXBlcy9nb2ZlYXR1cmVzcGI="
    ),
    "google/protobuf/java_features.proto": (
        "CiNnb29nbGUvcHJvdG9idWYvamF2YV9mZWF0dXJlcy5wcm90bxICcGIaIGdvb2dsZS9wcm90b2J1Zi9kZXNjcmlw"
        "dG9yLnByb3RvIt8ICgxKYXZhRmVhdHVyZXMSkAIKEmxlZ2FjeV9jbG9zZWRfZW51bRgBIAEoCELhAYgBAZgBBJgB"
        "AaIBCRIEdHJ1ZRiEB6IBChIFZmFsc2UY5weyAbsBCOgHEOgHGrIBVGhlIGxlZ2FjeSBjbG9zZWQgZW51bSBiZWhh"
        "dmlvciBpbiBKYXZhIGlzIGRlcHJlY2F0ZWQgYW5kIGlzIHNjaGVkdWxlZCB0byBiZSByZW1vdmVkIGluIGVkaXRp"
        "b24gMjAyNS4gIFNlZSBodHRwOi8vcHJvdG9idWYuZGV2L3Byb2dyYW1taW5nLWd1aWRlcy9lbnVtLyNqYXZhIGZv"
        "ciBtb3JlIGluZm9ybWF0aW9uLlIQbGVnYWN5Q2xvc2VkRW51bRKvAgoPdXRmOF92YWxpZGF0aW9uGAIgASgOMh8u"
        "cGIuSmF2YUZlYXR1cmVzLlV0ZjhWYWxpZGF0aW9uQuQBiAEBmAEEmAEBogEMEgdERUZBVUxUGIQHsgHIAQjoBxDp"
        "Bxq/AVRoZSBKYXZhLXNwZWNpZmljIHV0ZjggdmFsaWRhdGlvbiBmZWF0dXJlIGlzIGRlcHJlY2F0ZWQgYW5kIGlz"
        "IHNjaGVkdWxlZCB0byBiZSByZW1vdmVkIGluIGVkaXRpb24gMjAyNS4gIFV0ZjggdmFsaWRhdGlvbiBiZWhhdmlv"
        "ciBzaG91bGQgdXNlIHRoZSBnbG9iYWwgY3Jvc3MtbGFuZ3VhZ2UgdXRmOF92YWxpZGF0aW9uIGZlYXR1cmUuUg51"
        "dGY4VmFsaWRhdGlvbhI7CgpsYXJnZV9lbnVtGAMgASgIQhyIAQGYAQaYAQGiAQoSBWZhbHNlGIQHsgEDCOkHUgls"
        "YXJnZUVudW0SbgofdXNlX29sZF9vdXRlcl9jbGFzc25hbWVfZGVmYXVsdBgEIAEoCEIoiAEBmAEBogEJEgR0cnVl"
        "GIQHogEKEgVmYWxzZRjpB7IBBgjpByDpB1IbdXNlT2xkT3V0ZXJDbGFzc25hbWVEZWZhdWx0EpABChJuZXN0X2lu"
        "X2ZpbGVfY2xhc3MYBSABKA4yNy5wYi5KYXZhRmVhdHVyZXMuTmVzdEluRmlsZUNsYXNzRmVhdHVyZS5OZXN0SW5G"
        "aWxlQ2xhc3NCKogBAZgBA5gBBpgBCKIBCxIGTEVHQUNZGIQHogEHEgJOTxjpB7IBAwjpB1IPbmVzdEluRmlsZUNs"
        "YXNzGnwKFk5lc3RJbkZpbGVDbGFzc0ZlYXR1cmUiWAoPTmVzdEluRmlsZUNsYXNzEh4KGk5FU1RfSU5fRklMRV9D"
        "TEFTU19VTktOT1dOEAASBgoCTk8QARIHCgNZRVMQAhIUCgZMRUdBQ1kQAxoIIgYI6Qcg6QdKCAgBEICAgIACIkYK"
        "DlV0ZjhWYWxpZGF0aW9uEhsKF1VURjhfVkFMSURBVElPTl9VTktOT1dOEAASCwoHREVGQVVMVBABEgoKBlZFUklG"
        "WRACSgQIBhAHOkIKBGphdmESGy5nb29nbGUucHJvdG9idWYuRmVhdHVyZVNldBjpByABKAsyEC5wYi5KYXZhRmVh"
        "dHVyZXNSBGphdmFCKAoTY29tLmdvb2dsZS5wcm90b2J1ZkIRSmF2YUZlYXR1cmVzUHJvdG8="
    ),
    "google/type/calendar_period.proto": (
        "CiFnb29nbGUvdHlwZS9jYWxlbmRhcl9wZXJpb2QucHJvdG8SC2dvb2dsZS50eXBlKn8KDkNhbGVuZGFyUGVyaW9k"
        "Eh8KG0NBTEVOREFSX1BFUklPRF9VTlNQRUNJRklFRBAAEgcKA0RBWRABEggKBFdFRUsQAhINCglGT1JUTklHSFQQ"
        "AxIJCgVNT05USBAEEgsKB1FVQVJURVIQBRIICgRIQUxGEAYSCAoEWUVBUhAHQngKD2NvbS5nb29nbGUudHlwZUIT"
        "Q2FsZW5kYXJQZXJpb2RQcm90b1ABWkhnb29nbGUuZ29sYW5nLm9yZy9nZW5wcm90by9nb29nbGVhcGlzL3R5cGUv"
        "Y2FsZW5kYXJwZXJpb2Q7Y2FsZW5kYXJwZXJpb2SiAgNHVFBiBnByb3RvMw=="
    ),
    "google/type/color.proto": (
        "Chdnb29nbGUvdHlwZS9jb2xvci5wcm90bxILZ29vZ2xlLnR5cGUaHmdvb2dsZS9wcm90b2J1Zi93cmFwcGVycy5w"
        "cm90byJdCgVDb2xvchILCgNyZWQYASABKAISDQoFZ3JlZW4YAiABKAISDAoEYmx1ZRgDIAEoAhIqCgVhbHBoYRgE"
        "IAEoCzIbLmdvb2dsZS5wcm90b2J1Zi5GbG9hdFZhbHVlQl0KD2NvbS5nb29nbGUudHlwZUIKQ29sb3JQcm90b1AB"
        "WjZnb29nbGUuZ29sYW5nLm9yZy9nZW5wcm90by9nb29nbGVhcGlzL3R5cGUvY29sb3I7Y29sb3KiAgNHVFBiBnBy"
        "b3RvMw=="
    ),
    "google/type/date.proto": (
        "ChZnb29nbGUvdHlwZS9kYXRlLnByb3RvEgtnb29nbGUudHlwZSIwCgREYXRlEgwKBHllYXIYASABKAUSDQoFbW9u"
        "dGgYAiABKAUSCwoDZGF5GAMgASgFQloKD2NvbS5nb29nbGUudHlwZUIJRGF0ZVByb3RvUAFaNGdvb2dsZS5nb2xh"
        "bmcub3JnL2dlbnByb3RvL2dvb2dsZWFwaXMvdHlwZS9kYXRlO2RhdGWiAgNHVFBiBnByb3RvMw=="
    ),
    "google/type/datetime.proto": (
        "Chpnb29nbGUvdHlwZS9kYXRldGltZS5wcm90bxILZ29vZ2xlLnR5cGUaHmdvb2dsZS9wcm90b2J1Zi9kdXJhdGlv"
        "bi5wcm90byLgAQoIRGF0ZVRpbWUSDAoEeWVhchgBIAEoBRINCgVtb250aBgCIAEoBRILCgNkYXkYAyABKAUSDQoF"
        "aG91cnMYBCABKAUSDwoHbWludXRlcxgFIAEoBRIPCgdzZWNvbmRzGAYgASgFEg0KBW5hbm9zGAcgASgFEi8KCnV0"
        "Y19vZmZzZXQYCCABKAsyGS5nb29nbGUucHJvdG9idWYuRHVyYXRpb25IABIqCgl0aW1lX3pvbmUYCSABKAsyFS5n"
        "b29nbGUudHlwZS5UaW1lWm9uZUgAQg0KC3RpbWVfb2Zmc2V0IicKCFRpbWVab25lEgoKAmlkGAEgASgJEg8KB3Zl"
        "cnNpb24YAiABKAlCZgoPY29tLmdvb2dsZS50eXBlQg1EYXRlVGltZVByb3RvUAFaPGdvb2dsZS5nb2xhbmcub3Jn"
        "L2dlbnByb3RvL2dvb2dsZWFwaXMvdHlwZS9kYXRldGltZTtkYXRldGltZaICA0dUUGIGcHJvdG8z"
    ),
    "google/type/dayofweek.proto": (
        "Chtnb29nbGUvdHlwZS9kYXlvZndlZWsucHJvdG8SC2dvb2dsZS50eXBlKoQBCglEYXlPZldlZWsSGwoXREFZX09G"
        "X1dFRUtfVU5TUEVDSUZJRUQQABIKCgZNT05EQVkQARILCgdUVUVTREFZEAISDQoJV0VETkVTREFZEAMSDAoIVEhV"
        "UlNEQVkQBBIKCgZGUklEQVkQBRIMCghTQVRVUkRBWRAGEgoKBlNVTkRBWRAHQmkKD2NvbS5nb29nbGUudHlwZUIO"
        "RGF5T2ZXZWVrUHJvdG9QAVo+Z29vZ2xlLmdvbGFuZy5vcmcvZ2VucHJvdG8vZ29vZ2xlYXBpcy90eXBlL2RheW9m"
        "d2VlaztkYXlvZndlZWuiAgNHVFBiBnByb3RvMw=="
    ),
    "google/type/decimal.proto": (
        "Chlnb29nbGUvdHlwZS9kZWNpbWFsLnByb3RvEgtnb29nbGUudHlwZSIYCgdEZWNpbWFsEg0KBXZhbHVlGAEgASgJ"
        "QmMKD2NvbS5nb29nbGUudHlwZUIMRGVjaW1hbFByb3RvUAFaOmdvb2dsZS5nb2xhbmcub3JnL2dlbnByb3RvL2dv"
        "b2dsZWFwaXMvdHlwZS9kZWNpbWFsO2RlY2ltYWyiAgNHVFBiBnByb3RvMw=="
    ),
    "google/type/expr.proto": (
        "ChZnb29nbGUvdHlwZS9leHByLnByb3RvEgtnb29nbGUudHlwZSJQCgRFeHByEhIKCmV4cHJlc3Npb24YASABKAkS"
        "DQoFdGl0bGUYAiABKAkSEwoLZGVzY3JpcHRpb24YAyABKAkSEAoIbG9jYXRpb24YBCABKAlCWgoPY29tLmdvb2ds"
        "ZS50eXBlQglFeHByUHJvdG9QAVo0Z29vZ2xlLmdvbGFuZy5vcmcvZ2VucHJvdG8vZ29vZ2xlYXBpcy90eXBlL2V4"
        "cHI7ZXhwcqICA0dUUGIGcHJvdG8z"
    ),
    "google/type/fraction.proto": (
        "Chpnb29nbGUvdHlwZS9mcmFjdGlvbi5wcm90bxILZ29vZ2xlLnR5cGUiMgoIRnJhY3Rpb24SEQoJbnVtZXJhdG9y"
        "GAEgASgDEhMKC2Rlbm9taW5hdG9yGAIgASgDQmYKD2NvbS5nb29nbGUudHlwZUINRnJhY3Rpb25Qcm90b1ABWjxn"
        "b29nbGUuZ29sYW5nLm9yZy9nZW5wcm90by9nb29nbGVhcGlzL3R5cGUvZnJhY3Rpb247ZnJhY3Rpb26iAgNHVFBi"
        "BnByb3RvMw=="
    ),
    "google/type/interval.proto": (
        "Chpnb29nbGUvdHlwZS9pbnRlcnZhbC5wcm90bxILZ29vZ2xlLnR5cGUaH2dvb2dsZS9wcm90b2J1Zi90aW1lc3Rh"
        "bXAucHJvdG8iaAoISW50ZXJ2YWwSLgoKc3RhcnRfdGltZRgBIAEoCzIaLmdvb2dsZS5wcm90b2J1Zi5UaW1lc3Rh"
        "bXASLAoIZW5kX3RpbWUYAiABKAsyGi5nb29nbGUucHJvdG9idWYuVGltZXN0YW1wQmYKD2NvbS5nb29nbGUudHlw"
        "ZUINSW50ZXJ2YWxQcm90b1ABWjxnb29nbGUuZ29sYW5nLm9yZy9nZW5wcm90by9nb29nbGVhcGlzL3R5cGUvaW50"
        "ZXJ2YWw7aW50ZXJ2YWyiAgNHVFBiBnByb3RvMw=="
    ),
    "google/type/latlng.proto": (
        "Chhnb29nbGUvdHlwZS9sYXRsbmcucHJvdG8SC2dvb2dsZS50eXBlIi0KBkxhdExuZxIQCghsYXRpdHVkZRgBIAEo"
        "ARIRCglsb25naXR1ZGUYAiABKAFCYAoPY29tLmdvb2dsZS50eXBlQgtMYXRMbmdQcm90b1ABWjhnb29nbGUuZ29s"
        "YW5nLm9yZy9nZW5wcm90by9nb29nbGVhcGlzL3R5cGUvbGF0bG5nO2xhdGxuZ6ICA0dUUGIGcHJvdG8z"
    ),
    "google/type/localized_text.proto": (
        "CiBnb29nbGUvdHlwZS9sb2NhbGl6ZWRfdGV4dC5wcm90bxILZ29vZ2xlLnR5cGUiNAoNTG9jYWxpemVkVGV4dBIM"
        "CgR0ZXh0GAEgASgJEhUKDWxhbmd1YWdlX2NvZGUYAiABKAlCdwoPY29tLmdvb2dsZS50eXBlQhJMb2NhbGl6ZWRU"
        "ZXh0UHJvdG9QAVpIZ29vZ2xlLmdvbGFuZy5vcmcvZ2VucHJvdG8vZ29vZ2xlYXBpcy90eXBlL2xvY2FsaXplZF90"
        "ZXh0O2xvY2FsaXplZF90ZXh0ogIDR1RQYgZwcm90bzM="
    ),
    "google/type/money.proto": (
        "Chdnb29nbGUvdHlwZS9tb25leS5wcm90bxILZ29vZ2xlLnR5cGUiPAoFTW9uZXkSFQoNY3VycmVuY3lfY29kZRgB"
        "IAEoCRINCgV1bml0cxgCIAEoAxINCgVuYW5vcxgDIAEoBUJdCg9jb20uZ29vZ2xlLnR5cGVCCk1vbmV5UHJvdG9Q"
        "AVo2Z29vZ2xlLmdvbGFuZy5vcmcvZ2VucHJvdG8vZ29vZ2xlYXBpcy90eXBlL21vbmV5O21vbmV5ogIDR1RQYgZw"
        "cm90bzM="
    ),
    "google/type/month.proto": (
        "Chdnb29nbGUvdHlwZS9tb250aC5wcm90bxILZ29vZ2xlLnR5cGUqsAEKBU1vbnRoEhUKEU1PTlRIX1VOU1BFQ0lG"
        "SUVEEAASCwoHSkFOVUFSWRABEgwKCEZFQlJVQVJZEAISCQoFTUFSQ0gQAxIJCgVBUFJJTBAEEgcKA01BWRAFEggK"
        "BEpVTkUQBhIICgRKVUxZEAcSCgoGQVVHVVNUEAgSDQoJU0VQVEVNQkVSEAkSCwoHT0NUT0JFUhAKEgwKCE5PVkVN"
        "QkVSEAsSDAoIREVDRU1CRVIQDEJdCg9jb20uZ29vZ2xlLnR5cGVCCk1vbnRoUHJvdG9QAVo2Z29vZ2xlLmdvbGFu"
        "Zy5vcmcvZ2VucHJvdG8vZ29vZ2xlYXBpcy90eXBlL21vbnRoO21vbnRoogIDR1RQYgZwcm90bzM="
    ),
    "google/type/phone_number.proto": (
        "Ch5nb29nbGUvdHlwZS9waG9uZV9udW1iZXIucHJvdG8SC2dvb2dsZS50eXBlIqsBCgtQaG9uZU51bWJlchIVCgtl"
        "MTY0X251bWJlchgBIAEoCUgAEjgKCnNob3J0X2NvZGUYAiABKAsyIi5nb29nbGUudHlwZS5QaG9uZU51bWJlci5T"
        "aG9ydENvZGVIABIRCglleHRlbnNpb24YAyABKAkaMAoJU2hvcnRDb2RlEhMKC3JlZ2lvbl9jb2RlGAEgASgJEg4K"
        "Bm51bWJlchgCIAEoCUIGCgRraW5kQnEKD2NvbS5nb29nbGUudHlwZUIQUGhvbmVOdW1iZXJQcm90b1ABWkRnb29n"
        "bGUuZ29sYW5nLm9yZy9nZW5wcm90by9nb29nbGVhcGlzL3R5cGUvcGhvbmVfbnVtYmVyO3Bob25lX251bWJlcqIC"
        "A0dUUGIGcHJvdG8z"
    ),
    "google/type/postal_address.proto": (
        "CiBnb29nbGUvdHlwZS9wb3N0YWxfYWRkcmVzcy5wcm90bxILZ29vZ2xlLnR5cGUi/QEKDVBvc3RhbEFkZHJlc3MS"
        "EAoIcmV2aXNpb24YASABKAUSEwoLcmVnaW9uX2NvZGUYAiABKAkSFQoNbGFuZ3VhZ2VfY29kZRgDIAEoCRITCgtw"
        "b3N0YWxfY29kZRgEIAEoCRIUCgxzb3J0aW5nX2NvZGUYBSABKAkSGwoTYWRtaW5pc3RyYXRpdmVfYXJlYRgGIAEo"
        "CRIQCghsb2NhbGl0eRgHIAEoCRITCgtzdWJsb2NhbGl0eRgIIAEoCRIVCg1hZGRyZXNzX2xpbmVzGAkgAygJEhIK"
        "CnJlY2lwaWVudHMYCiADKAkSFAoMb3JnYW5pemF0aW9uGAsgASgJQnUKD2NvbS5nb29nbGUudHlwZUISUG9zdGFs"
        "QWRkcmVzc1Byb3RvUAFaRmdvb2dsZS5nb2xhbmcub3JnL2dlbnByb3RvL2dvb2dsZWFwaXMvdHlwZS9wb3N0YWxh"
        "ZGRyZXNzO3Bvc3RhbGFkZHJlc3OiAgNHVFBiBnByb3RvMw=="
    ),
    "google/type/quaternion.proto": (
        "Chxnb29nbGUvdHlwZS9xdWF0ZXJuaW9uLnByb3RvEgtnb29nbGUudHlwZSI4CgpRdWF0ZXJuaW9uEgkKAXgYASAB"
        "KAESCQoBeRgCIAEoARIJCgF6GAMgASgBEgkKAXcYBCABKAFCbAoPY29tLmdvb2dsZS50eXBlQg9RdWF0ZXJuaW9u"
        "UHJvdG9QAVpAZ29vZ2xlLmdvbGFuZy5vcmcvZ2VucHJvdG8vZ29vZ2xlYXBpcy90eXBlL3F1YXRlcm5pb247cXVh"
        "dGVybmlvbqICA0dUUGIGcHJvdG8z"
    ),
    "google/type/timeofday.proto": (
        "Chtnb29nbGUvdHlwZS90aW1lb2ZkYXkucHJvdG8SC2dvb2dsZS50eXBlIksKCVRpbWVPZkRheRINCgVob3VycxgB"
        "IAEoBRIPCgdtaW51dGVzGAIgASgFEg8KB3NlY29uZHMYAyABKAUSDQoFbmFub3MYBCABKAVCaQoPY29tLmdvb2ds"
        "ZS50eXBlQg5UaW1lT2ZEYXlQcm90b1ABWj5nb29nbGUuZ29sYW5nLm9yZy9nZW5wcm90by9nb29nbGVhcGlzL3R5"
        "cGUvdGltZW9mZGF5O3RpbWVvZmRheaICA0dUUGIGcHJvdG8z"
    ),
}
