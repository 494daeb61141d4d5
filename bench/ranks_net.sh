#!/bin/sh
# Two ranks on two "machines": network namespaces with a link of a given rate between them. Runs a command in each by
# mpirun, as root, and removes the namespaces afterwards. The rate has the syntax of tc, or is none:
#   bench/ranks_net.sh 2.5gbit build/steel bench model.gguf -t 1 -p 512 -n 0
# RANKS_NET_DELAY=50us adds a delay in each direction. Both ranks see the same files.
set -eu
[ $# -ge 2 ] || { sed -n '2,6s/^# //p' "$0"; exit 2; }
rate=$1; shift
id=$$ a=ranks-a-$$ b=ranks-b-$$ net=10.77.$(($$ % 256))
work=$(mktemp -d)
trap 'ip netns del $a 2>/dev/null; ip netns del $b 2>/dev/null; rm -rf "$work"' EXIT INT TERM
ip netns add $a
ip netns add $b
ip link add v$id-a netns $a type veth peer name v$id-b netns $b
for end in a b; do
    ns=ranks-$end-$id
    [ $end = a ] && at=$net.1 || at=$net.2
    ip -n $ns link set lo up
    ip -n $ns addr add $at/24 dev v$id-$end
    ip -n $ns link set v$id-$end up
    parent=root
    if [ -n "${RANKS_NET_DELAY:-}" ]; then
        tc -n $ns qdisc add dev v$id-$end root handle 1: netem delay "$RANKS_NET_DELAY" limit 100000
        parent="parent 1:"
    fi
    [ "$rate" = none ] || tc -n $ns qdisc add dev v$id-$end $parent tbf rate "$rate" burst 256kb latency 50ms
done
# The command with which mpirun starts its helper on the other machine. Its first word is the machine. A different host name
# prevents shared memory between the two.
cat > "$work/agent" <<END
#!/bin/sh
shift
exec ip netns exec $b unshare --uts sh -c "hostname $b && \$*"
END
chmod +x "$work/agent"
ip netns exec $a unshare --uts sh -c 'hostname "$0" && exec "$@"' $a mpirun --allow-run-as-root --bind-to none --mca plm_rsh_agent "$work/agent" \
    --mca oob_tcp_if_include $net.0/24 --mca btl_tcp_if_include $net.0/24 --mca pml ob1 --mca btl self,tcp \
    --host $net.1:1,$net.2:1 -n 2 "$@"
