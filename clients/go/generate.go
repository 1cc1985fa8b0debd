package slotwise

//go:generate protoc -I../../protos --go_out=. --go-grpc_out=. --go_opt=module=slotwise,Mslotwise/v1/inference.proto=slotwise/slotwisepb --go-grpc_opt=module=slotwise,Mslotwise/v1/inference.proto=slotwise/slotwisepb slotwise/v1/inference.proto
